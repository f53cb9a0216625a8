"""The ways into SGLang's processes, tried on a package of its shape; the real one is asked in
with_sglang_engine.py."""

import os
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

from mla_kernels.sglang import fit, hook, pth
from mla_kernels.sglang.__main__ import main

ROOT = Path(__file__).parent.parent

REGISTRY = '''
import logging
logging.basicConfig(level="INFO", format="%(message)s")
ATTENTION_BACKENDS = {}

def create_triton_backend(runner):
    from .triton_backend import TritonAttnBackend
    return TritonAttnBackend(runner)

ATTENTION_BACKENDS["triton"] = create_triton_backend
ATTENTION_BACKENDS["other"] = print
'''

#: As much as a signature check looks at.
BACKEND = '''
class AttentionBackend:
    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True): pass
    def init_forward_metadata(self, forward_batch): pass

class TritonAttnBackend(AttentionBackend):
    use_mla = False
    def __init__(self, runner): self.runner = runner
    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.extend_attention_fwd(q)
    def init_forward_metadata(self, forward_batch): pass
    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False): pass
'''
KERNELS = f'''
def extend_attention_fwd({", ".join(fit.POSITIONAL)}, logit_cap=0.0, page_size=1): pass
'''
MODES = '''
class ForwardMode:
    def is_target_verify(self): return True
'''

#: Eight processes as SGLang makes them, from a parent that imports the registry itself.
SPAWN = '''
import multiprocessing

def worker(rank, said):
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as backends
    from mla_kernels.sglang.hook import is_ours
    said.put((rank, is_ours(backends["triton"]), is_ours(backends["other"])))

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    said = context.Queue()
    ranks = [context.Process(target=worker, args=(rank, said)) for rank in range(8)]
    for process in ranks:
        process.start()
    print(sorted(said.get(timeout=60) for _ in ranks))
    for process in ranks:
        process.join()
'''


def write_sglang(folder, **files):
    """A package of SGLang's shape."""
    paths = {fit.REGISTRY: REGISTRY, fit.BACKEND: BACKEND, fit.MODES: MODES,
             fit.KERNELS[0]: KERNELS} | files
    for name, text in paths.items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        for parent in path.relative_to(folder).parents:
            (folder / parent / "__init__.py").touch()
        path.write_text(text)
    (folder / "__init__.py").unlink()
    info = folder / "sglang-9.9.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.9\n")


@pytest.fixture
def python(tmp_path):
    """An environment of its own with the package in it; runs code there."""
    venv.create(tmp_path / "env", symlinks=True, with_pip=False)
    (site,) = tmp_path.glob("env/lib/python*/site-packages")
    ours = [p for p in sys.path if p.endswith("site-packages")]
    (site / "aaa_of_the_tests.pth").write_text("\n".join(ours))  # torch and the like
    write_sglang(site)

    def run(*arguments, status=0, **environment):
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("MLA_KERNELS_SGLANG")}
        done = subprocess.run([tmp_path / "env" / "bin" / "python", *arguments], text=True,
                              capture_output=True, cwd=tmp_path, timeout=300,
                              env={**inherited, **environment})
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    run.site = site
    return run


def install(python, command="install"):
    return python("-m", "mla_kernels.sglang", command, PYTHONPATH=str(ROOT))


def test_eight_spawned_processes_have_the_hook(python, tmp_path):
    install(python)
    script = tmp_path / "spawn.py"
    script.write_text(SPAWN)
    on = python(str(script), MLA_KERNELS_SGLANG="1")
    assert on.strip() == str([(rank, True, False) for rank in range(8)])
    assert python(str(script)).strip() == str([(rank, False, False) for rank in range(8)])


def test_uninstall_leaves_no_trace(python):
    before = sorted(python.site.iterdir())
    assert str(python.site / pth.NAME) in install(python)
    assert sorted(python.site.iterdir()) != before
    install(python)  # again is no error
    assert "removed" in install(python, "uninstall")
    assert sorted(python.site.iterdir()) == before
    assert "nothing to remove" in install(python, "uninstall")
    code = ("import sys, sglang.srt.layers.attention.attention_registry as r; "
            "print(r.ATTENTION_BACKENDS['triton'].__module__, 'mla_kernels' in sys.modules)")
    assert python("-c", code, MLA_KERNELS_SGLANG="1").split() == [fit.REGISTRY, "False"]


def test_a_process_without_the_variable_imports_nothing(python):
    install(python)
    code = "import sys; print([m for m in sys.modules if m.startswith(('mla_kernels', 'torch'))])"
    assert python("-c", code).strip() == "[]"
    on = python("-c", code, MLA_KERNELS_SGLANG="1")
    assert "mla_kernels.sglang.hook" in on and "torch" not in on


def test_as_a_plugin_it_does_nothing_unless_asked(python):
    code = ("from mla_kernels.sglang.hook import activate, is_ours; activate(); "
            "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as b; "
            "print(is_ours(b['triton'])); activate(); print(is_ours(b['triton']))")
    for on in ("0", "1"):
        said = python("-c", code, PYTHONPATH=str(ROOT), MLA_KERNELS_SGLANG=on)
        assert said.split() == [str(on == "1")] * 2


def test_a_package_that_has_gone_is_passed_over(python):
    install(python)
    path = python.site / pth.NAME
    path.write_text(path.read_text().replace(str(ROOT), "/nowhere"))
    (python.site / "aaa_of_the_tests.pth").unlink()
    assert python("-c", "print('ran')", MLA_KERNELS_SGLANG="1").strip() == "ran"


EXTEND = "forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):"
MAKE = ("from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS as b; "
        "print(type(b['triton']('runner')).__name__, b['triton']('runner').runner)")


def test_a_fitting_sglang_is_asked_what_the_backend_is_for(python):
    install(python)
    said = python("-c", MAKE, MLA_KERNELS_SGLANG="1")
    assert "left untouched: it is not the Triton backend of an MLA model" in said
    assert "TritonAttnBackend runner" in said.splitlines()


@pytest.mark.parametrize(("name", "old", "new", "message"), [
    (fit.BACKEND, f"def {EXTEND}\n        self", f"def {EXTEND.replace('extend', 'prefill')}\n"
     "        self", "TritonAttnBackend.forward_extend is not there"),
    (fit.BACKEND, f"def {EXTEND}\n        self", f"def {EXTEND.replace('k, v', 'kv')}\n"
     "        self", r"must begin \(self, q, k, v, layer, "),
    (fit.BACKEND, "init_forward_metadata_out_graph", "prepare", "has none of init_forward_met"),
    (fit.BACKEND, "in_capture", "capturing", r"out_graph must begin .*in_capture\); it has"),
    (fit.BACKEND, "self.extend_attention_fwd", "self.extend", "does not call self.extend_atten"),
    (fit.BACKEND, "class TritonAttnBackend(", "class TritonBackend(", "has no TritonAttnBackend"),
    (fit.KERNELS[0], "custom_mask, is_causal", "mask, is_causal", "extend_attention_fwd must be"),
    (fit.KERNELS[0], "page_size=1", "*, page_table", "extend_attention_fwd also needs page_table"),
    (fit.MODES, "is_target_verify", "is_verify", "has no ForwardMode.is_target_verify"),
])
def test_an_sglang_of_another_shape_is_left_untouched(name, old, new, message, python):
    text = {fit.BACKEND: BACKEND, fit.KERNELS[0]: KERNELS, fit.MODES: MODES}[name]
    assert old in text
    write_sglang(python.site, **{name: text.replace(old, new)})
    install(python)
    make = "" if "TritonBackend" in new else MAKE
    said = python("-c", "from mla_kernels.sglang.__main__ import main; "
                  f"print('doctor', main(['doctor'])); {make}", MLA_KERNELS_SGLANG="1")
    assert re.search(message, said) and "left untouched" in said and "doctor 1" in said
    assert not make or ("TritonAttnBackend runner" in said.splitlines()
                        and len(re.findall(message, said)) == 3)  # two backends were made


def test_a_registry_without_the_backend_is_left_untouched(python):
    write_sglang(python.site, **{fit.REGISTRY: REGISTRY.replace('["triton"]', '["triton2"]')})
    install(python)
    code = "import sglang.srt.layers.attention.attention_registry as r; print(r.__loader__)"
    said = python("-c", code, MLA_KERNELS_SGLANG="1")
    assert "has no ATTENTION_BACKENDS['triton']" in said and "SourceFileLoader" in said


def test_a_wrong_setting_leaves_sglang_untouched(python):
    install(python)
    said = python("-c", MAKE, MLA_KERNELS_SGLANG="1", MLA_KERNELS_SGLANG_SHADOW="often")
    assert "MLA_KERNELS_SGLANG_SHADOW must be a number of verify steps" in said
    assert "TritonAttnBackend runner" in said.splitlines()


def test_doctor(python):
    doctor = python("-m", "mla_kernels.sglang", "doctor", PYTHONPATH=str(ROOT))
    assert "SGLang 9.9 fits, though it is none of the versions tried" in doctor
    assert "ATTENTION_BACKENDS['triton']" in doctor and "MLA_KERNELS_SGLANG=0" in doctor
    assert "init_forward_metadata_out_graph" in doctor and "replay_cuda_graph" not in doctor
    assert ".pth file: none" in doctor
    install(python)
    assert str(python.site / pth.NAME) in python("-m", "mla_kernels.sglang", "doctor")


def test_without_sglang(monkeypatch, capsys):
    monkeypatch.setattr(fit.importlib.util, "find_spec", lambda name: None)
    assert main(["doctor"]) == 1 and "SGLang is not installed here" in capsys.readouterr().out


def test_a_folder_that_is_not_there_is_an_error(tmp_path, capsys):
    assert main(["install", "--into", str(tmp_path / "none")]) == 2
    assert "error:" in capsys.readouterr().err


def test_the_plugin_entry_point_is_declared_and_names_the_hook():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (target,) = project["entry-points"]["sglang.srt.plugins"].values()
    module, function = target.split(":")
    assert (module, getattr(hook, function)) == (hook.__name__, hook.activate)


def test_the_registry_is_one_place():
    assert hook.REGISTRY == fit.REGISTRY
