"""Programs written for vLLM that import batchinfer instead."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

import batchinfer
from batchinfer import LLM
from batchinfer.errors import ExitCode, UsageError
from batchinfer.vllm import install
from batchinfer.vllm.functions import get_tokenizer
from batchinfer.vllm.names import MODULES, VERSION


@pytest.fixture(autouse=True)
def imports_are_restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the alias before each test, because the documentation's examples install it too."""
    others = [f for f in sys.meta_path if type(f).__module__ != "batchinfer.vllm.alias"]
    monkeypatch.setattr(sys, "meta_path", others)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def run(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m batchinfer.vllm`` in a folder."""
    command = [sys.executable, "-m", "batchinfer.vllm", *arguments]
    path = str(Path(batchinfer.__file__).parents[1])
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_name_of_the_alias_exists() -> None:
    install()
    install()  # does nothing
    assert find_spec("vllm") is not None
    assert version("vllm") == VERSION
    for module, names in MODULES.items():
        imported = importlib.import_module(module)
        assert sorted(names) == dir(imported)
        for name in names:
            assert getattr(imported, name) is not None
    assert importlib.import_module("vllm").LLM is LLM


def test_names_that_batchinfer_lacks_are_not_found() -> None:
    install()
    with pytest.raises(ImportError, match=r"cannot import name 'EngineArgs' from 'vllm' \(.*alias"):
        exec("from vllm import EngineArgs")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'vllm\.engine'"):
        importlib.import_module("vllm.engine.arg_utils")


def test_installed_vllm_is_hidden_only_if_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("LLM = 'the real one'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"vllm is installed .*\n.*--replace"):
        install()
    assert importlib.import_module("vllm").LLM == "the real one"
    with pytest.raises(UsageError, match="vllm is imported already"):
        install(replace=True)
    del sys.modules["vllm"]
    install(replace=True)
    assert importlib.import_module("vllm").LLM is LLM


@pytest.mark.parametrize("how", [("-m", "tools.client"), ("tools/client.py",)])
def test_program_runs_as_with_python(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "other.py").write_text("")
    (tmp_path / "tools" / "client.py").write_text(
        "import sys\n"
        "import vllm\n"
        f"import {'tools.other' if how[0] == '-m' else 'other'}\n"
        "print(__name__, vllm.__version__, sys.argv[1:], 'torch' in sys.modules)\n"
        "sys.exit(7)\n"
    )
    done = run(*how, "-m", "x", folder=tmp_path)
    assert (done.stdout, done.stderr) == (f"__main__ {VERSION} ['-m', 'x'] False\n", "")
    assert done.returncode == 7


@pytest.mark.parametrize("arguments", [(), ("-m",), ("--zork",)])
def test_usage(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, folder=tmp_path)
    assert done.returncode == ExitCode.USAGE
    assert done.stderr.startswith("usage: python -m batchinfer.vllm ")


def test_tokenizer_with_own_code_needs_trust(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "c"))
    folder = tmp_path / "model"
    shutil.copytree(model, folder)
    code = "import transformers\nclass Own(transformers.PreTrainedTokenizerFast): pass\n"
    (folder / "own.py").write_text(code)
    path = folder / "tokenizer_config.json"
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("it must not ask"))
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        get_tokenizer(folder)
    assert type(get_tokenizer(folder, trust_remote_code=True)).__name__ == "Own"


def test_functions_that_clients_call(llm: LLM, model: Path) -> None:
    install()
    from vllm.distributed.parallel_state import (  # type: ignore[import-not-found]
        destroy_distributed_environment,
        destroy_model_parallel,
    )
    from vllm.renderers.hf import resolve_chat_template  # type: ignore[import-not-found]
    from vllm.tokenizers import get_tokenizer as of_vllm  # type: ignore[import-not-found]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tokenizer = of_vllm(model, tokenizer_mode="auto", trust_remote_code=False)
    config = llm.llm_engine.model_config
    given = resolve_chat_template(tokenizer, "{{ messages }}", None, model_config=config)
    own = resolve_chat_template(tokenizer, None, tools=None, model_config=config)
    assert (given, own) == ("{{ messages }}", tokenizer.chat_template)
    tokenizer.chat_template = None
    assert resolve_chat_template(tokenizer, None, None, model_config=config) is None
    assert config.max_model_len == llm.max_model_len
    destroy_model_parallel()
    destroy_distributed_environment()
