"""Names of apex that amplab has elsewhere, or not at all: each is found, or refused with what to use."""

import importlib
import importlib.util
import sys

import pytest

import amplab
from amplab import amp, fp16_utils, parallel
from amplab.multi_tensor_apply import amp_c, apex_c
from amplab.scripts.apex_names import HOMES, INSTEAD, refusal

# What scripts write, and what they get.
FOUND = [
    ("from apex.parallel import create_syncbn_process_group as got", parallel.create_syncbn_process_group),
    ("from apex.parallel.distributed import flat_dist_call as got", parallel.distributed.flat_dist_call),
    ("from apex.parallel.optimized_sync_batchnorm import SyncBatchNorm as got", parallel.SyncBatchNorm),
    ("from apex.amp import _amp_state as got", amp._amp_state),
    ("from apex.amp._amp_state import _amp_state as got", amp._amp_state),
    ("import apex.amp._amp_state as got", amp._amp_state),
    ("from apex.amp.frontend import _amp_state as got", amp._amp_state),
    ("from apex.amp.handle import scale_loss as got", amp.scale_loss),
    ("from apex.amp import handle; got = handle.disable_casts", amp.disable_casts),
    ("from apex.amp import amp; got = amp.initialize", amp.initialize),
    ("from apex.amp.amp import *; got = half_function", amp.half_function),
    ("from apex.fp16_utils.fp16util import network_to_half as got", fp16_utils.network_to_half),
    ("from apex.fp16_utils.fp16_optimizer import FP16_Optimizer as got", fp16_utils.FP16_Optimizer),
    ("import amp_C as got", amp_c),
    ("from apex_C import unflatten as got", apex_c.unflatten),
    ("from apex.fp16_utils.loss_scaler import DynamicLossScaler as got", fp16_utils.DynamicLossScaler),
]
REFUSED = [
    ("from apex.amp.lists import functional_overrides", "apex.amp.lists", "amp.register_half_function"),
    ("import apex.amp.utils", "apex.amp.utils", "from apex import amp"),
    ("from apex.optimizers import FP16_Optimizer", "apex.optimizers.FP16_Optimizer", "apex.fp16_utils.FP16_Optimizer"),
    ("import apex.parallel.multiproc", "apex.parallel.multiproc", "torchrun"),
    ("import apex.pyprof", "apex.pyprof", "torch.profiler"),
    ("from apex import pyprof", "apex.pyprof", "torch.profiler"),
    ("from apex.mlp import MLP", "apex.mlp", "torch.nn.Sequential"),
    ("from apex.RNN import LSTM", "apex.RNN", "torch.nn.LSTM"),
    ("from apex.reparameterization import apply_weight_norm", "apex.reparameterization", "weight_norm"),
    ("from apex.contrib.xentropy import SoftmaxCrossEntropyLoss", "apex.contrib", "cross_entropy"),
    ("from apex import contrib", "apex.contrib", "cross_entropy"),
    ("import apex.anything", "apex.anything", "amp, fp16_utils, multi_tensor_apply, normalization"),
    ("import importlib; importlib.import_module('fused_layer_norm_cuda')", "fused_layer_norm_cuda", "FusedLayerNorm"),
    ("import syncbn", "syncbn", "apex.parallel.SyncBatchNorm"),
]


@pytest.mark.parametrize(("line", "expected"), FOUND, ids=[line for line, _ in FOUND])
def test_what_amplab_has_elsewhere_is_found(line, expected):
    names = {}
    with amplab.as_apex():
        exec(line, names)
    assert names["got"] == expected


@pytest.mark.parametrize(("line", "name", "instead"), REFUSED, ids=[line for line, _, _ in REFUSED])
def test_what_amplab_has_not_is_refused_with_what_to_use(line, name, instead):
    with amplab.as_apex(), pytest.raises(ModuleNotFoundError) as refused:
        exec(line, {})
    said = str(refused.value)
    assert said.startswith(f"{name}: ")
    assert instead in said
    assert said.endswith(".")
    assert refused.value.name == name


def test_every_row_is_refused_by_its_own_sentence():
    with amplab.as_apex():
        for name, instead in INSTEAD.items():
            package, _, last = name.rpartition(".")
            with pytest.raises(ModuleNotFoundError) as refused:
                exec(f"from {package} import {last}" if package else f"import {name}", {})
            assert str(refused.value) == refusal(name)
            assert instead in str(refused.value)


def test_those_who_only_ask_are_told_no():
    with amplab.as_apex():
        assert [importlib.util.find_spec(name) for name in ("apex.contrib", "syncbn", "apex.anything")] == [None] * 3
        apex = importlib.import_module("apex")
        assert not hasattr(apex, "contrib")
        assert not hasattr(apex.optimizers, "FP16_Optimizer")
        assert not hasattr(apex.amp, "lists")


@pytest.mark.parametrize("error", ["ImportError", "ModuleNotFoundError"])
def test_scripts_that_go_on_without_do_so(error):
    names = {}
    with amplab.as_apex():
        exec(f"try:\n    import syncbn\n    from apex.contrib import mlp\nexcept {error}:\n    syncbn = None", names)
    assert names["syncbn"] is None


def test_an_unknown_name_raises_the_usual_error():
    with amplab.as_apex():
        with pytest.raises(ImportError, match=r"cannot import name 'anything' from 'amplab.amp'"):
            exec("from apex.amp import anything", {})
        with pytest.raises(ModuleNotFoundError, match=r"^No module named 'no_such_module'$"):
            importlib.import_module("no_such_module")


def test_what_is_installed_under_such_a_name_comes_first(tmp_path, monkeypatch):
    (tmp_path / "syncbn.py").write_text("mean_var = 'of somebody else'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with amplab.as_apex():
        assert importlib.import_module("syncbn").mean_var == "of somebody else"
    del sys.modules["syncbn"]


def test_undo_removes_the_second_names_and_the_refusals():
    with amplab.as_apex():
        for name in HOMES:
            importlib.import_module(name)
            if name.startswith("apex."):
                importlib.import_module(name.replace("apex", "amplab", 1))
    assert not hasattr(amp, "handle")
    assert not [name for name in sys.modules if name.startswith("apex.") or name.replace("amplab", "apex", 1) in HOMES]
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'amp_C'$"):
        importlib.import_module("amp_C")


def test_modules_of_amplab_have_the_same_names_without_apex():
    exec("from amplab.amp._amp_state import maybe_print, warn_or_err, master_params, AmpState", {})
    exec("from amplab.amp.scaler import LossScaler; from amplab.amp.amp import init", {})
    exec("from amplab.fp16_utils.fp16util import prep_param_lists, to_python_float, tofp16", {})
    assert importlib.import_module("amplab.amp._amp_state") is amp._amp_state
    assert importlib.util.find_spec("amplab.amp._amp_state").name == "amplab.amp._amp_state"
