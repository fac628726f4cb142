"""Images in the prompts of ``LLM.generate`` and ``LLM.chat``."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from batchinfer import LLM, BeamSearchParams, SamplingParams
from batchinfer.builders.tokenizer import make_tokenizer
from batchinfer.config import ModelConfig, PromptConfig
from batchinfer.errors import NotYetError
from batchinfer.text.images.files import ImageFile, ImageFiles
from batchinfer.text.images.image_placeholders import ImageSettings
from batchinfer.text.images.loading import load_image_processor
from batchinfer.text.images.token_prompts import TokenPrompts
from batchinfer.text.prompts import PromptBuilder
from batchinfer.worker.vision.support import image_support
from tests.job.images.pictures import encoded, picture, png
from tests.models import make_text_model
from tests.vision_folders import make_vision_folder

GREEDY = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
TEXT = "<|im_start|>user\n<image>Which?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = make_vision_folder("llava", tmp_path_factory.mktemp("llava"))
    return LLM(str(folder), dtype="float32", num_kv_blocks=256)


def prompt(image: Any, text: str = TEXT) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": image}}


def tokens(llm: LLM, *prompts: Any, **options: Any) -> list[list[int]]:
    outputs = llm.generate([*prompts], GREEDY, use_tqdm=False, **options)
    return [output.outputs[0].token_ids for output in outputs]


def test_pictures_arrays_and_files_are_equal(llm: LLM) -> None:
    forms = [picture(1), np.asarray(picture(1)), png(1), [picture(1)]]
    first, *others = tokens(llm, *map(prompt, forms))
    assert others == [first] * 3
    assert tokens(llm, prompt(picture(2))) != [first]


def test_outputs_show_the_tokens_of_the_vocabulary(llm: LLM) -> None:
    (output,) = llm.generate([prompt(png(1))], GREEDY, use_tqdm=False)
    image_token = llm.get_tokenizer().convert_tokens_to_ids("<image>")
    assert output.prompt_token_ids.count(image_token) == 16
    assert min(output.prompt_token_ids) >= 0
    assert output.prompt == TEXT


def test_chat_takes_images_of_several_forms(llm: LLM) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(1)).decode()
    text = {"type": "text", "text": "Which?"}
    parts = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": picture(1)},
        {"type": "image_pil", "image_pil": picture(1)},
        {"type": "image", "image": png(1)},
        {"type": "image", "image": {"bytes": png(1), "path": "a.png"}},
        {"type": "image", "image": np.asarray(picture(1))},
    ]
    talks = [[{"role": "user", "content": [part, text]}] for part in parts]
    outputs = llm.chat(talks, GREEDY, use_tqdm=False)
    expected = tokens(llm, prompt(picture(1)))[0]
    assert [output.outputs[0].token_ids for output in outputs] == [expected] * 6


def test_pixels_beyond_the_limit_are_decoded_again(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [prompt(png(number)) for number in range(20, 28)]
    whole = tokens(llm, *prompts)
    llm.reset_prefix_cache()
    monkeypatch.setattr("batchinfer.requests.images.PIXEL_BYTES", 1)
    assert tokens(llm, *prompts) == whole


@pytest.mark.parametrize(
    ("family", "placeholder", "types"),
    [
        ("gemma3", "<start_of_image>", "token_type_ids"),
        ("gemma4", "<|image|>", "mm_token_type_ids"),
    ],
)
def test_tokens_of_an_image_see_each_other(
    family: str, placeholder: str, types: str, tmp_path: Path
) -> None:
    folder = make_vision_folder(family, tmp_path)
    llm = LLM(str(folder), dtype="float32", num_kv_blocks=256)
    text = f"<|im_start|>user\n{placeholder}Which?<|im_end|>\n"
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, logprobs=0)
    (output,) = llm.generate([prompt(picture(1), text)], params, use_tqdm=False)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    token_id = model.config.image_token_id
    processor = load_image_processor(folder, token_id, {})
    drawn = output.outputs[0].token_ids
    ids = torch.tensor([[*output.prompt_token_ids, *drawn]])
    is_image = (ids == token_id).int()
    arrays = processor.inputs(picture(1), output.prompt_token_ids.count(token_id))
    inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
    with torch.no_grad():
        logits = model(input_ids=ids, **inputs, **{types: is_image}).logits[0, -len(drawn) - 1 : -1]
    logprobs = logits.log_softmax(dim=1)[torch.arange(len(drawn)), torch.tensor(drawn)]
    assert output.outputs[0].cumulative_logprob == pytest.approx(float(logprobs.sum()), abs=1e-3)


def test_images_and_embeddings_in_one_batch_share_no_blocks(tmp_path: Path) -> None:
    folder = make_vision_folder("llava", tmp_path)
    llm = LLM(str(folder), dtype="float32", num_kv_blocks=256, enable_prompt_embeds=True)
    vector = torch.randn(1, 64, generator=torch.Generator().manual_seed(0))
    mixed = [{"prompt_embeds": vector.repeat(40, 1)}, prompt(png(1), "<image>Which?")]
    alone = []
    for one in mixed:
        alone += tokens(llm, one)
        llm.reset_prefix_cache()
    first, second = (llm.generate(one, GREEDY, use_tqdm=False)[0] for one in mixed)
    assert second.num_cached_tokens == 0
    assert [output.outputs[0].token_ids for output in (first, second)] == alone
    llm.reset_prefix_cache()
    assert tokens(llm, *mixed) == alone


def test_samples_share_an_image(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, n=3, temperature=1.0, seed=1, ignore_eos=True)
    (output,) = llm.generate([prompt(png(3))], params, use_tqdm=False)
    assert len(output.outputs) == 3


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (prompt(png(1)[:-100]), "cannot be decoded"),
        (prompt(b"nothing"), "unknown image format"),
        (prompt([png(1), png(2)]), "1 image placeholders"),
        (prompt([]), "1 image placeholders"),
        (prompt(png(1), "no place"), "0 image placeholders"),
        (prompt("picture.png"), "an image has the type str"),
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": png(1)}}, "0 image placeholders"),
        ({"prompt_token_ids": 5, "multi_modal_data": {"image": png(1)}}, "a list of token ids"),
        ({"prompt": TEXT, "multi_modal_data": [png(1)]}, "give {'image'"),
        ({"prompt": TEXT, "multi_modal_data": {"images": png(1)}}, "unknown key 'images'"),
        (prompt(np.zeros((3, 4, 40), np.uint8)), r"of uint8 with the shape \(3, 4, 40\); pass"),
        (prompt(np.zeros((4, 4, 3))), r"of float64 with the shape \(4, 4, 3\); pass"),
        (prompt(Image.new("RGB", (0, 0))), "an image has 0 x 0 pixels"),
        (prompt(Image.new("1", (10000, 10000))), "make the picture smaller"),
    ],
)
def test_bad_images_are_refused(llm: LLM, bad: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as raised:
        tokens(llm, prompt(png(1)), bad)
    assert str(raised.value).startswith("prompt 1: ")
    assert not re.search(r"\brow\b", str(raised.value))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image"}, "has no image; set its field image to one"),
        ({"type": "image", "image": b"nothing"}, "an image has an unknown image format"),
        ({"type": "image", "image": np.zeros((4, 4, 3))}, "of float64 .* pass a PIL image"),
        ({"type": "image_url", "image_url": "a.png"}, "a.png is a path .* give the bytes"),
        ({"type": "image_url", "image_url": "http://a/b.png"}, "b.png is a path or a web address"),
    ],
)
def test_bad_images_of_chats_are_refused(llm: LLM, part: Any, message: str) -> None:
    talk = [{"role": "user", "content": [part, {"type": "text", "text": "Which?"}]}]
    with pytest.raises(
        (ValueError, TypeError), match=f"^(prompt|conversation) 0: .*{message}"
    ) as raised:
        llm.chat(talk, GREEDY, use_tqdm=False)
    assert not re.search(r"\brow\b|\binput\.|\bprompt\.", str(raised.value))


def test_a_place_for_an_image_needs_an_image(llm: LLM) -> None:
    """Jobs refuse such rows, too."""
    for text in (TEXT, {"prompt": TEXT}, prompt([]), {"prompt": TEXT, "multi_modal_data": None}):
        with pytest.raises(ValueError, match=r"prompt 1: .*1 image placeholders \(<image>\)"):
            tokens(llm, "no place", text)
    with pytest.raises(ValueError, match="give them in multi_modal_data, or remove"):
        llm.beam_search(TEXT, BeamSearchParams(beam_width=2, max_tokens=2), use_tqdm=False)
    outputs = llm.generate([TEXT, "no place"], GREEDY, use_tqdm=False, errors="return")
    assert [output.error and output.error.code for output in outputs] == [
        "unsupported_content",
        None,
    ]


def test_a_bad_image_is_the_error_of_its_prompt(llm: LLM) -> None:
    good = prompt(png(1))
    outputs = llm.generate(
        [good, prompt(encoded(picture(1), "JPEG")[:-100]), good],
        GREEDY,
        use_tqdm=False,
        errors="return",
    )
    assert [output.error is None for output in outputs] == [True, False, True]
    assert outputs[1].error.code == "invalid_image"


def test_a_damaged_picture_is_the_error_of_its_prompt(llm: LLM) -> None:
    """Pillow finds the damage only when it decodes the pixels, in this process."""
    bad, closed = Image.open(io.BytesIO(png(1)[:-100])), Image.open(io.BytesIO(png(1)))
    closed.close()
    ids = llm.get_tokenizer().encode(TEXT, add_special_tokens=False)
    in_ids = {"prompt_token_ids": ids, "multi_modal_data": {"image": closed}}
    prompts = [prompt(bad), in_ids, prompt(png(1))]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, errors="return")
    talk = [{"role": "user", "content": [{"type": "image_pil", "image_pil": bad}]}]
    outputs += llm.chat([talk, [{"role": "user", "content": "a"}]], GREEDY, errors="return")
    codes = [output.error and output.error.code for output in outputs]
    assert codes == ["invalid_image", "invalid_image", None, "invalid_image", None]


def test_pictures_are_turned_upright_as_files_are(llm: LLM) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(picture(1), "PNG", exif=exif)
    file, opened, upright = tokens(
        llm, *map(prompt, (data, Image.open(io.BytesIO(data)), picture(1).rotate(-90, expand=True)))
    )
    assert opened == file == upright
    assert file != tokens(llm, prompt(picture(1)))[0]


def test_sound_is_not_supported_yet(llm: LLM) -> None:
    with pytest.raises(NotYetError, match="multi_modal_data with audio"):
        tokens(llm, {"prompt": "a", "multi_modal_data": {"audio": b""}})


def test_token_ids_have_a_place_for_each_image(llm: LLM) -> None:
    text = "<image>Compare<image> them"
    images = [png(1), picture(2)]
    ids = llm.get_tokenizer()(text)["input_ids"]
    of_ids = {"prompt_token_ids": ids, "prompt": text, "multi_modal_data": {"image": images}}
    first, second = llm.generate([prompt(images, text), of_ids], GREEDY, use_tqdm=False)
    assert second.prompt_token_ids == first.prompt_token_ids
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert second.prompt == text
    assert tokens(llm, {**of_ids, "multi_modal_data": {"image": images[::-1]}}) != [
        first.outputs[0].token_ids
    ]


@pytest.mark.parametrize("family", ["gemma3", "mistral3", "qwen2_5_vl"])
def test_token_ids_get_the_tokens_of_a_text(tmp_path: Path, family: str) -> None:
    folder = make_vision_folder(family, tmp_path)
    support = image_support(folder, AutoConfig.from_pretrained(folder))
    settings = ImageSettings(folder, support.token_id, ImageFiles(), 10**6, {})
    tokenizer = make_tokenizer(ModelConfig(name=str(folder)))
    text, images = f"a{settings.placeholder()}b", [ImageFile(png(1))]
    builder = PromptBuilder(
        PromptConfig(
            column="text", images="image", chat_template="none", parse_special_tokens=True
        ),
        tokenizer,
        max_model_len=10**6,
        columns=["text", "image"],
        images=settings,
    )
    (expected,) = builder.build([{"text": text, "image": images}])
    (ids,) = tokenizer.encode_batch([text], add_special_tokens=True, parse_special_tokens=True)
    (made,) = TokenPrompts(settings, tokenizer).tokenize(
        [{"token_ids": ids, "text": None, "images": images}]
    )
    assert made.token_ids.tolist() == expected.token_ids.tolist()
    assert min(made.token_ids) == -1


def test_prompt_logprobs_cannot_cover_images(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with pytest.raises(ValueError, match="cannot be combined with images"):
        llm.generate([prompt(png(1))], params, use_tqdm=False)


def test_logprobs_after_an_image_have_texts(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0.0, logprobs=1, repetition_penalty=1.1)
    (output,) = llm.generate([prompt(png(1), "<image>")], params, use_tqdm=False)
    assert output.outputs[0].logprobs is not None


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    llm = LLM(str(make_text_model(tmp_path / "model")), num_kv_blocks=64)
    with pytest.raises(ValueError, match=r"prompt 0 has .* takes only text"):
        tokens(llm, prompt(png(1)))
