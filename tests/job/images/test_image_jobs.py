"""Jobs with images give the same answers as transformers with the model's own processor."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from batchinfer.engine.simulate.roofline import DEVICES
from batchinfer.errors import ExitCode, ModelError, UsageError
from batchinfer.job.output.directory import OutputDir
from batchinfer.job.plan.plan import plan_job
from batchinfer.job.plan.plan_summary import plan_facts
from batchinfer.job.run.run_job import run_job
from batchinfer.job.spec.load import load_job
from batchinfer.job.spec.spec import JobSpec
from batchinfer.report.captions import time_slices
from batchinfer.report.from_output import from_output
from batchinfer.report.page import page
from batchinfer.report.thumbnails import MOST_PICTURES
from batchinfer.text.images.loading import load_image_processor
from batchinfer.worker.model.config import load_config
from batchinfer.worker.vision.tower import vision_tower_bytes
from tests.job.images.pictures import HUB_IMAGE, picture, png
from tests.job.job_files import SCORE, write_job
from tests.models import make_text_model
from tests.parity import TIE
from tests.vision_folders import PROCESSOR_FAMILIES, make_vision_folder
from tests.vision_models import RELATED_FAMILIES, VISION_FAMILIES, answer_logits

FAMILIES = [
    family for family in PROCESSOR_FAMILIES if family in (*VISION_FAMILIES, *RELATED_FAMILIES)
]
QUICK_FAMILIES = ("llava", "qwen3_vl")
"""Families whose processors and placeholders differ most; the others are tested less often."""
IMAGES_OF_ROWS = ([0], [1, 2], [], [0], [3, 0, 4, 1], [], [2], [0, 0])
MAX_TOKENS = 6
GREEDY = {"max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(family, marks=() if family in QUICK_FAMILIES else pytest.mark.long)
        for family in FAMILIES
    ],
)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def model(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_folder(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_vision_folder("llava", tmp_path_factory.mktemp("llava"))


def job(folder: Path, model: Path, rows: pa.Table, **changes: Any) -> JobSpec:
    pq.write_table(rows, folder / "rows.parquet")
    return JobSpec.model_validate(
        {
            "model": {"name": str(model), "dtype": "float32"},
            "input": {"path": str(folder / "rows.parquet"), **changes.pop("input", {})},
            "prompt": {"column": "text", "images": "image", **changes.pop("prompt", {})},
            "sampling": GREEDY,
            "engine": {"max_num_seqs": 4, **changes.pop("engine", {})},
            "output": {
                "path": str(folder / "out"),
                "include": ["token_ids"],
                "rows_per_part": 3,
            },
            "errors": {"max_error_rate": 1.0},
            **changes,
        }
    )


def hub_rows(rows: Any = IMAGES_OF_ROWS) -> pa.Table:
    cells = [[{"bytes": png(number), "path": None} for number in row] for row in rows]
    return pa.table(
        {
            "text": [f"Compare them {at % 3}" for at in range(len(rows))],
            "image": pa.array(cells, pa.list_(HUB_IMAGE)),
        }
    )


def results(folder: Path) -> list[dict[str, Any]]:
    return pq.read_table(folder / "out" / "data").sort_by("row_id").to_pylist()


def reference_inputs(processor: Any, text: str, images: list[Image.Image]) -> dict[str, Any]:
    """Return the arguments of transformers' model for a text with images."""
    if callable(processor):
        return dict(processor(text=text, images=images or None, return_tensors="pt"))
    # transformers' PixtralProcessor needs torchvision.
    first, *rest = text.split(processor.image_token)
    inputs, texts = {}, []
    if images:
        inputs, texts = processor._process_images(images, return_tensors="pt")
    text = first + "".join(map("".join, zip(texts, rest, strict=True)))
    return {**processor.tokenizer(text, return_tensors="pt"), **inputs}


def test_answers_equal_transformers(tmp_path: Path, family: str, model: Path) -> None:
    reference = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    token_id = reference.config.image_token_id
    # If the model generated an image token, transformers would expect another image.
    sampling = {**GREEDY, "logit_bias": {token_id: -100.0}}
    assert run_job(job(tmp_path, model, hub_rows(), sampling=sampling), quiet=True) is ExitCode.OK
    processor = load_image_processor(model, token_id, {})._processor
    for row, numbers in zip(results(tmp_path), IMAGES_OF_ROWS, strict=True):
        parts = [{"type": "image"}] * len(numbers) + [{"type": "text", "text": row["text"]}]
        text = processor.tokenizer.apply_chat_template(
            [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
        )
        images = [picture(number) for number in numbers]
        inputs = reference_inputs(processor, text, images)
        assert inputs["input_ids"].shape[1] == row["num_prompt_tokens"]
        drawn = torch.tensor(row["outputs"][0]["token_ids"])
        inputs["input_ids"] = torch.cat([inputs["input_ids"], drawn[None]], dim=1)
        wanted = {"input_ids", "pixel_values", "image_sizes"}
        wanted |= {"image_grid_thw", "image_position_ids"}
        wanted |= {"pixel_values_local", "num_local_patches", "patches_grid"}
        wanted |= {"pixel_attention_mask", "spatial_shapes"}
        inputs = {name: value for name, value in inputs.items() if name in wanted}
        if inputs.keys() & {"image_grid_thw", "image_position_ids"}:
            inputs["mm_token_type_ids"] = (inputs["input_ids"] == token_id).int()
        if family == "gemma3":
            inputs["token_type_ids"] = (inputs["input_ids"] == token_id).int()
        with torch.no_grad():
            ids = inputs.pop("input_ids")
            logits = answer_logits(reference, ids, row["num_prompt_tokens"], inputs)
        logits = logits[-MAX_TOKENS - 1 : -1]
        places = torch.arange(MAX_TOKENS), drawn
        # Log-probabilities may differ even if the greedy tokens are equal.
        expected = float(logits.log_softmax(dim=1)[places].sum())
        got = row["outputs"][0]["cumulative_logprob"]
        assert got == pytest.approx(expected, abs=1e-3), row["row_id"]
        logits[:, token_id] = -torch.inf
        taken = logits[places]
        assert (logits.max(dim=1).values - taken).max() < TIE, row["row_id"]


def test_plan_counts_the_tokens_of_the_run(tmp_path: Path, llava: Path) -> None:
    spec = job(tmp_path, llava, hub_rows())
    plan = plan_job(spec)
    assert run_job(spec, quiet=True) is ExitCode.OK
    summary = json.loads((tmp_path / "out" / "summary.json").read_bytes())
    assert plan["prompt_tokens"] == summary["tokens"]["prompt"]
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")
    # Rows 0 and 3 are equal, and so are the first images of rows 0 and 6.
    assert plan["images"] == sum(steps["images_encoded"].to_pylist()) == 5
    assert plan["image_tokens"] == 16 * plan["images"]
    config, rate = load_config(llava), DEVICES["cpu"].flops[4]
    parameters, patches = vision_tower_bytes(config, "float32") // 4, plan["image_tokens"]
    width = config.vision_config.num_hidden_layers * config.vision_config.hidden_size
    seconds = 2 * parameters * patches / 0.8 + 4 * width * 16 * patches / 0.5
    assert plan["encode_s"] == pytest.approx(seconds / rate)
    assert plan["encode_s"] < plan["time_s"]
    assert "images      5 different images with 80 tokens" in "\n".join(
        f"{line.label:<11} {line.value}{line.note}" for line in plan_facts(plan)
    )
    computed = sum(steps["image_tokens"].to_pylist())
    assert 0 < computed <= 16 * sum(map(len, IMAGES_OF_ROWS))
    assert sum(steps["images"].to_pylist()) >= 5


def test_the_report_shows_pictures_and_the_time_of_encoding(tmp_path: Path, llava: Path) -> None:
    rows = hub_rows([[0, 1], [2, 3, 4, 5, 6], []])
    broken = pa.array([[{"bytes": b"GIF89a", "path": None}]], pa.list_(HUB_IMAGE))
    rows = pa.concat_tables([rows, pa.table({"text": ["?"], "image": broken})])
    spec = job(tmp_path, llava, rows)
    assert run_job(spec, quiet=True) is ExitCode.OK
    data = from_output(OutputDir(tmp_path / "out"), now=0.0)
    pictures = {example.row_id: example.pictures for example in data.examples}
    counts = {row_id: len(urls) for row_id, urls in pictures.items()}
    assert counts == {0: 2, 1: MOST_PICTURES, 3: 0}
    with Image.open(io.BytesIO(base64.b64decode(pictures[0][1].partition(",")[2]))) as small:
        assert small.size == picture(1).size
    html = page(data)
    assert all(url in html for urls in pictures.values() for url in urls)
    assert "7 images" in {part.note for part in time_slices(data)}


def test_the_report_of_images_that_are_gone(tmp_path: Path, llava: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(0))
    rows = pa.table({"text": ["Which?"], "image": ["a.png"]})
    assert run_job(job(tmp_path, llava, rows), quiet=True) is ExitCode.OK
    out = OutputDir(tmp_path / "out")
    assert len(from_output(out, now=0.0).examples[0].pictures) == 1
    (tmp_path / "a.png").unlink()
    assert not from_output(out, now=0.0).examples[0].pictures


def test_plan_counts_the_weights_of_the_vision_tower(tmp_path: Path, llava: Path) -> None:
    spec = job(tmp_path, llava, hub_rows())
    text = job(tmp_path, llava, hub_rows(), prompt={"images": None})
    both, one = (plan_job(each)["model"]["weight_bytes"] for each in (spec, text))
    config = load_config(llava)
    assert both - one == vision_tower_bytes(config, "float32")


def test_resumed_rows_have_the_same_answers(tmp_path: Path, llava: Path) -> None:
    spec = job(tmp_path, llava, hub_rows())
    assert run_job(spec, quiet=True) is ExitCode.OK
    whole = results(tmp_path)
    (tmp_path / "out" / "data" / "part-00001.parquet").unlink()
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert results(tmp_path) == whole


def test_conversations_hold_images_in_parts(tmp_path: Path, llava: Path) -> None:
    """Images come from the parts themselves, or from the column where a part has none."""
    (tmp_path / "a.png").write_bytes(png(0))
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image_url", pa.string())])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    text = {"type": "text", "text": "Which?", "image_url": None}
    own = {"type": "image_url", "text": None, "image_url": "a.png"}
    next_image = {"type": "image", "text": None, "image_url": None}
    contents = [[own, text], [next_image, text], [own, next_image, text], []]
    rows = pa.table(
        {
            "text": pa.array(
                [[{"role": "user", "content": content}] for content in contents],
                pa.list_(message),
            ),
            "image": pa.array([None, png(0), png(1), png(2)], pa.binary()),
        }
    )
    assert run_job(job(tmp_path, llava, rows), quiet=True) is ExitCode.OK
    first, second, third, _ = done = results(tmp_path)
    assert [row["error"] for row in done] == [None] * 4
    assert first["outputs"] == second["outputs"]
    assert third["num_prompt_tokens"] == first["num_prompt_tokens"] + 16


def talks_with_hub_images(*images: Any) -> pa.Table:
    """Return conversations whose parts hold images as the Hub stores them."""
    part = pa.struct([("type", pa.string()), ("text", pa.string()), ("image", HUB_IMAGE)])
    message = pa.struct([("role", pa.string()), ("content", pa.list_(part))])
    text = {"type": "text", "text": "Which?", "image": None}
    talks = [
        [{"role": "user", "content": [{"type": "image", "text": None, "image": image}, text]}]
        for image in images
    ]
    return pa.table({"text": pa.array(talks, pa.list_(message))})


def test_parts_hold_images_as_the_hub_stores_them(tmp_path: Path, llava: Path) -> None:
    """A struct of nulls stands for the image of the column."""
    (tmp_path / "a.png").write_bytes(png(1))
    rows = talks_with_hub_images(
        {"bytes": png(1), "path": "no.png"},
        {"bytes": None, "path": "a.png"},
        {"bytes": None, "path": None},
    )
    rows = rows.append_column("image", pa.array([None, None, png(1)], pa.binary()))
    assert run_job(job(tmp_path, llava, rows), quiet=True) is ExitCode.OK
    first, *others = results(tmp_path)
    assert first["error"] is None
    assert [row["outputs"] for row in others] == [first["outputs"]] * 2


def test_a_text_model_refuses_rows_with_images(tmp_path: Path) -> None:
    model = make_text_model(tmp_path / "model")
    rows = talks_with_hub_images({"bytes": png(1), "path": None})
    prompt = {"images": None, "chat_template": str(tmp_path / "chat.jinja")}
    (tmp_path / "chat.jinja").write_text("{{ messages[0].content[0].text }}")
    assert run_job(job(tmp_path, model, rows, prompt=prompt), quiet=True) is ExitCode.OK
    (row,) = results(tmp_path)
    assert row["error"]["code"] == "unsupported_content"


def test_json_lines_may_mix_texts_and_parts(tmp_path: Path, llava: Path) -> None:
    """No Arrow type fits such a column, so its rows are kept as JSON text."""
    (tmp_path / "a.png").write_bytes(png(0))
    parts = [{"type": "image_url", "image_url": "a.png"}, {"type": "text", "text": "Which?"}]
    talks = [[{"role": "user", "content": content}] for content in ("Hello", parts)]
    lines = [json.dumps({"messages": talk}) for talk in talks]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    spec = job(
        tmp_path,
        llava,
        hub_rows(),
        input={"path": str(tmp_path / "rows.jsonl")},
        prompt={"column": "messages", "images": None},
    )
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert [row["error"] for row in results(tmp_path)] == [None, None]


def test_equal_images_are_encoded_once(tmp_path: Path, llava: Path) -> None:
    """Also if they are in different windows, and no row holds them in between."""
    rows = hub_rows([[at % 4] for at in range(24)] + [[4]] * 24 + [[at % 5] for at in range(24)])
    spec = job(tmp_path, llava, rows, engine={"max_num_seqs": 2, "order_window": 8})
    assert run_job(spec, quiet=True) is ExitCode.OK
    steps = pq.read_table(tmp_path / "out" / "stats" / "steps.parquet")
    assert sum(steps["images_encoded"].to_pylist()) == 5


@pytest.mark.parametrize("refused", [False, pytest.param(True, marks=pytest.mark.long)])
def test_pixels_of_finished_rows_make_room_for_later_rows(
    tmp_path: Path, llava: Path, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """Rows whose images are cached, or that the engine refuses, never need their pixels."""
    monkeypatch.setattr("batchinfer.requests.images.PIXEL_BYTES", 40_000)  # three images
    rows = hub_rows([[at % 30] for at in range(60)])  # two windows of the same images
    changes: dict[str, Any] = {"engine": {"max_num_seqs": 2, "order_window": 30}}
    if refused:
        changes["sampling"] = {**GREEDY, "prompt_logprobs": 0}
        include = ["prompt_logprobs"]
        changes["output"] = {"path": str(tmp_path / "out"), "include": include, "rows_per_part": 3}
    spec = job(tmp_path, llava, rows, **changes)
    assert run_job(spec, quiet=True) is ExitCode.OK
    assert {row["error"] is None for row in results(tmp_path)} == {not refused}


def test_score_takes_no_images(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"prompt\.images needs task: generate"):
        load_job(write_job(tmp_path, SCORE + "prompt: {images: image}\n"))


def test_a_text_model_refuses_an_image_column(tmp_path: Path) -> None:
    model = make_text_model(tmp_path / "model")
    with pytest.raises(ModelError, match="takes only text"):
        run_job(job(tmp_path, model, hub_rows()), quiet=True)
