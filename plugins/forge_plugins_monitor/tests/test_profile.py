"""``profile``: a trace of a few steps, and where their time goes."""

import gzip
import json
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from forge_core.cli import main
from forge_plugins_monitor.profile import by_kind, kind_of, self_times, table
from forge_testing.callback import CallbackConformance


class TestProfile(CallbackConformance):
    component = "forge-plugins-monitor:profile"
    config = {"start": 2, "steps": 1, "warmup": 1}
    steps = 4

    def test_writes_a_trace_and_a_table_of_its_steps(self, tmp_path) -> None:
        _, run = self.start(tmp_path)

        run.go()

        (trace,) = tmp_path.rglob("profile/*.json.gz")
        assert trace.name == "steps_2_to_2_rank_0.json.gz"
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events}
        assert "ProfilerStep#1" in names  # counted from 0, the warm-up first
        assert any("mm" in name for name in names)
        text = trace.with_name("steps_2_to_2_rank_0.txt").read_text()
        assert "matmul" in text
        assert "aten::" in text


def test_operators_and_kernels_are_told_by_their_names():
    assert {name: kind_of(name) for name in NAMES} == NAMES


NAMES = {
    "aten::mm": "matmul",
    "aten::addmm": "matmul",
    "aten::_grouped_mm": "matmul",
    "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_NNT": "matmul",
    "sm90_xmma_gemm_bf16bf16_bf16f32": "matmul",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL": "communication",
    "gloo:all_gather": "communication",
    "c10d::allreduce_": "communication",
    "aten::copy_": "memory",
    "Memcpy DtoD (Device -> Device)": "memory",
    "aten::silu": "other",
    "aten::mmap_nothing": "other",
}


def event(key, *, cpu=0.0, cuda=0.0, on=DeviceType.CPU, is_annotation=False):
    """As ``torch.profiler`` has one, in microseconds."""
    return SimpleNamespace(
        key=key,
        self_cpu_time_total=cpu,
        self_device_time_total=cuda,
        device_type=on,
        is_user_annotation=is_annotation,
    )


def test_frames_of_the_record_and_of_python_are_no_work_and_a_kernel_counts_once():
    events = [
        event("aten::mm", cpu=30.0, cuda=500.0),
        event("sm90_gemm", cuda=500.0, on=DeviceType.CUDA),
        event("ProfilerStep#3", cpu=900.0),
        event("threading.py(331): wait", cpu=800.0),
        event("nn.Module: Linear_0", cpu=700.0),
        event("<built-in method apply>", cpu=600.0),
        event("mine", cpu=500.0, is_annotation=True),
    ]

    assert self_times(events, on_gpu=False) == pytest.approx({"aten::mm": 3e-5})
    assert self_times(events, on_gpu=True) == pytest.approx({"sm90_gemm": 5e-4})


def test_times_add_up():
    times = {"aten::mm": 0.006, "aten::bmm": 0.002, "aten::copy_": 0.001, "aten::silu": 0.001}

    assert by_kind(times) == pytest.approx({"matmul": 0.008, "memory": 0.001, "other": 0.001})
    kinds, operators = table(times, steps=2).split("\n\n")
    assert kinds.splitlines()[1].split() == ["matmul", "4.000", "80.0%"]
    assert operators.splitlines()[1].split() == ["aten::mm", "3.000", "60.0%"]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("start=399, steps=3", "callbacks[0].start: the record ends with step 401, after the last one"),
        ("start=1", "callbacks[0].start: must be above warmup = 1, got 1"),
        ("start=0", "callbacks[0].start"),
        ("step=3", "did you mean 'steps'?"),
    ],
)
def test_a_record_that_cannot_be_is_refused(capsys, keys, sentence):
    assert main(["validate", "configs/demo.toml", f"callbacks=[{{name='profile', {keys}}}]"]) == 2
    assert sentence in capsys.readouterr().err


def test_a_record_may_end_with_the_last_step():
    assert main(["validate", "configs/demo.toml", "callbacks=[{name='profile', start=398, steps=3}]"]) == 0
