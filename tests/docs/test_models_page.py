"""The page of models agrees with the code, and every claim on it has a test."""

from __future__ import annotations

from types import ModuleType

import pytest
import transformers

from batchinfer.config.model import ENCODER_FAMILIES
from batchinfer.pooling.classifier import HEADED_FAMILIES
from tests import families, models, vision_models, wrappers
from tests.docs.pages import ROOT
from tests.job.rows.test_classify_encoder import HEADS
from tests.scripts import load_script

PAGE = (ROOT / "docs" / "models.md").read_text()
CLASSIFIED_BY_TESTS = {family for family, _ in HEADS}
RUN_BY_TESTS = {
    *families.FAMILIES,
    *models.FAMILIES,
    *models.RECURRENT_FAMILIES,
    *vision_models.RELATED_FAMILIES,
    *vision_models.VISION_FAMILIES,
    *wrappers.FAMILIES,
}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    return load_script(ROOT / "docs" / "make_models.py")


def test_models_page_is_up_to_date(generator: ModuleType) -> None:
    if f"transformers {transformers.__version__}." not in PAGE:
        pytest.skip("the page was made with another version of transformers")
    assert generator.page_text() == PAGE, "run make reference"


def test_every_supported_model_has_a_test(generator: ModuleType) -> None:
    answers = {
        family: row.split("|")[3].strip()
        for family in generator.MODELS
        for row in PAGE.splitlines()
        if f"| `{family}` |" in row
    }
    assert answers.keys() == generator.MODELS.keys()
    runs = {family for family, answer in answers.items() if not answer.startswith("refused: ")}
    assert runs <= RUN_BY_TESTS


def test_every_encoder_is_listed_and_its_head_tested(generator: ModuleType) -> None:
    rows = PAGE.partition("## Encoders")[2].splitlines()
    tasks = {row.split("|")[2].strip(" `"): row.split("|")[3] for row in rows if "| `" in row}
    assert set(tasks) == set(ENCODER_FAMILIES)
    classify = {family for family, text in tasks.items() if "classify" in text}
    assert classify == set(HEADED_FAMILIES) == CLASSIFIED_BY_TESTS
