"""Every public name of torch.cuda is redirected, harmless, or refused with a sentence: `cuda_names` is the list."""

import importlib
import pkgutil

import pytest
import torch

from amplab.scripts.cpu_tensors import STORAGE_TYPES, TENSOR_TYPES
from amplab.scripts.cuda_names import ANSWERS, HARMLESS, IDLE, REFUSED
from amplab.scripts.cuda_on_cpu import cuda_on_cpu

TOP_LEVEL = ("random", "memory", "streams", "graphs")  # their names are names of torch.cuda, too
SUBMODULES = {
    module.name: importlib.import_module(f"torch.cuda.{module.name}")
    for module in pkgutil.iter_modules(torch.cuda.__path__)
    if not module.name.startswith("_")
}
UNLISTED = ("AcceleratorError", "OutOfMemoryError", "comm", "gds", "green_contexts")
UNLISTED += ("nccl.version", "nccl.init_rank", "nccl.unique_id")
NAMES = sorted({*torch.cuda.__all__, *UNLISTED}) + sorted(
    f"{path}.{name}"
    for path, module in SUBMODULES.items()
    if path not in (*TOP_LEVEL, "green_contexts")
    for name in getattr(module, "__all__", [name for name in vars(module) if name.endswith("Tensor")])
)


def place(name):
    path, _, last = name.rpartition(".")
    return (getattr(torch.cuda, path) if path else torch.cuda), last


def value_of(name):
    owner, last = place(name)
    return getattr(owner, last)


BEFORE = {name: value_of(name) for name in NAMES}


@pytest.fixture(scope="module")
def redirected():
    with cuda_on_cpu(lambda line: None):
        yield {name for name in NAMES if value_of(name) is not BEFORE[name]}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_redirected_harmless_or_refused(redirected, name):
    if name in REFUSED:
        assert name in redirected
        with pytest.raises(RuntimeError, match=rf"torch\.cuda\.{name}: not available under `amplab run --device cpu`"):
            value_of(name)()
    else:
        assert (name in redirected) != (name in HARMLESS)


def test_the_tables_name_nothing_twice_and_nothing_that_is_absent():
    tables = [set(ANSWERS), set(IDLE), set(REFUSED), set(HARMLESS)]
    assert sum(map(len, tables)) == len(set.union(*tables))
    assert set.union(*tables) <= {*NAMES}


def test_answers_and_idle_names_run(redirected):
    for name, answer in ANSWERS.items():
        assert value_of(name)() == answer
    for name in IDLE:
        assert value_of(name)(0) is None
    for name in ("nvtx.range", "profiler.profile"):
        with value_of(name)(*(["step"] if name == "nvtx.range" else [])):
            pass
    for name in (*TENSOR_TYPES, *STORAGE_TYPES):
        assert callable(getattr(torch.cuda, name))


@pytest.mark.parametrize("path", TOP_LEVEL)
def test_a_name_of_a_submodule_is_the_name_of_torch_cuda(redirected, path):
    module = SUBMODULES[path]
    for name in getattr(module, "__all__", ("Stream", "Event", "ExternalStream")):
        if name in NAMES:
            assert getattr(module, name) is getattr(torch.cuda, name), name


def test_submodules_answer_as_scripts_ask(redirected):
    state = torch.cuda.random.get_rng_state_all()
    drawn = torch.rand(2)
    torch.cuda.random.set_rng_state_all(state)
    assert torch.equal(torch.rand(2), drawn)
    torch.cuda.random.manual_seed_all(3)
    assert torch.cuda.random.initial_seed() == torch.cuda.default_generators[0].initial_seed() == 3
    with torch.cuda.stream(torch.cuda.streams.Stream()):
        torch.cuda.memory.empty_cache()
    assert isinstance(torch.cuda.streams.Event(), torch.cuda.Event)


def test_versions_answer_while_cuda_is_there(redirected):
    assert int(torch.version.cuda.split(".")[0]) >= 11
    assert torch.backends.cudnn.is_available()
    assert torch.backends.cudnn.version() >= 8000


def test_amplabs_own_builds_and_reports_see_the_real_torch():
    from amplab.diagnose.machine import _cuda
    from amplab.kernels.builder.recipe import current_recipe

    before, said = current_recipe(), _cuda()
    with cuda_on_cpu(lambda line: None):
        during = current_recipe()
        assert (during, during.key) == (before, before.key)
        assert _cuda() == said
    assert torch.version.cuda is None or torch.backends.cuda.is_built()
