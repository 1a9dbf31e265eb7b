"""Every attention backend against full attention under a block-diagonal mask, forward and gradient."""

from __future__ import annotations

import importlib.util
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from split_core.attention import AttentionBackend, choose_backend
from split_core.attention.masked import MaskedAttention, block_diagonal
from split_core.attention.sdpa import WORTH_GROUPING, SdpaAttention, group
from split_core.attention.varlen import VarlenAttention
from split_core.errors import SplitError
from split_core.packing import Segments, pack
from split_core.quadtree import build_layout
from strategies import Case, cases, random_pyramid, seeds

CPU = torch.device("cpu")


def segments_of(lengths: list[int]) -> Segments:
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    return Segments(starts, tuple(lengths), max(lengths, default=0))


def qkv(total: int, seed: int = 0, dtype: torch.dtype = torch.float32, heads: int = 2, width: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(total, heads, width, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def compare(backend: AttentionBackend, reference: AttentionBackend, segments: Segments, seed: int = 0) -> None:
    inputs = qkv(segments.total, seed)
    outputs, gradients = [], []
    for one in (backend, reference):
        out = one.attend(*inputs, segments, scale=0.3)
        weights = torch.linspace(-1, 1, out.numel()).view_as(out)
        outputs.append(out)
        gradients.append(torch.autograd.grad((out * weights).sum(), inputs))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=1e-4)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)
few_lengths = st.lists(st.sampled_from([2, 5]), min_size=2 * WORTH_GROUPING, max_size=16)
one_length = st.tuples(st.integers(1, 9), st.integers(1, 6)).map(lambda pair: [pair[0]] * pair[1])


@given(st.one_of(lengths, few_lengths, one_length), seeds)
def test_sdpa_is_the_masked_reference(lengths: list[int], seed: int) -> None:
    compare(SdpaAttention(), MaskedAttention(), segments_of(lengths), seed)


CASES = {"uniform": [4] * 5, "grouped": [3, 5, 3, 3, 5, 5, 3, 5, 3], "split": [1, 7, 2, 3, 1], "one_image": [6]}


@pytest.mark.parametrize("case", CASES)
def test_each_of_the_three_cases_is_taken_and_right(case: str) -> None:
    segments, backend = segments_of(CASES[case]), SdpaAttention()
    assert (segments.uniform is not None) == (case in ("uniform", "one_image"))
    compare(backend, MaskedAttention(), segments)
    grouped = segments.kept.get("sdpa")
    assert (grouped is not None) == (case == "grouped")
    assert backend._groups(segments) is grouped or case != "grouped"


@given(st.lists(st.integers(1, 6), min_size=1, max_size=12))
def test_the_reference_is_softmax_attention_over_each_image_alone(lengths: list[int]) -> None:
    q, k, v = (x.detach() for x in qkv(sum(lengths)))
    out = MaskedAttention().attend(q, k, v, segments_of(lengths), scale=0.3)
    expected = []
    for a, b, c in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        weights = (torch.einsum("ihe,jhe->hij", a, b) * 0.3).softmax(-1)
        expected.append(torch.einsum("hij,jhe->ihe", weights, c))
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-5, rtol=1e-4)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_grouping_sorts_by_length_and_back(lengths: list[int]) -> None:
    segments = segments_of(lengths)
    groups = group(segments.lengths, segments.cu_seqlens)
    tokens = list(range(segments.total))
    parts = torch.arange(segments.total).split(lengths)
    ordered = [part for n in sorted(set(lengths)) for part in parts if len(part) == n]
    assert torch.equal(groups.order, torch.cat(ordered))
    assert groups.order[groups.back].tolist() == groups.back[groups.order].tolist() == tokens
    assert groups.shapes == tuple((lengths.count(n), n) for n in sorted(set(lengths)))


@pytest.mark.parametrize("backend", [SdpaAttention, MaskedAttention, VarlenAttention])
@pytest.mark.parametrize("total", [19, 21, 0])
def test_segments_that_do_not_add_up_are_refused(backend: type[AttentionBackend], total: int) -> None:
    with pytest.raises(ValueError, match=f"segments hold 20 tokens but the sequence has {total}"):
        backend().attend(*qkv(total), segments_of([10, 10]), scale=1.0)


@pytest.mark.parametrize("backend", [SdpaAttention, MaskedAttention, VarlenAttention])
def test_no_tokens(backend: type[AttentionBackend]) -> None:
    out = backend().attend(*qkv(0), segments_of([]), scale=1.0)
    assert out.shape == (0, 2, 8)


@pytest.mark.parametrize("backend", [SdpaAttention, MaskedAttention])
@pytest.mark.parametrize("case", CASES)
def test_float32_queries_and_keys_with_half_precision_values(backend: type[AttentionBackend], case: str) -> None:
    """What q and k norms hand over under autocast."""
    segments = segments_of(CASES[case])
    q, k, v = qkv(segments.total)
    out = backend().attend(q, k, v.bfloat16(), segments, scale=0.3)
    assert out.dtype == torch.bfloat16
    exact = MaskedAttention().attend(q, k, v, segments, scale=0.3)
    torch.testing.assert_close(out.float(), exact, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("case", CASES)
def test_dropout_is_passed_on(case: str) -> None:
    segments = segments_of(CASES[case])
    q, k, v = qkv(segments.total)
    ones = torch.ones_like(v)
    torch.manual_seed(0)
    dropped = SdpaAttention().attend(q, k, ones, segments, scale=0.3, dropout=0.5)
    assert not torch.allclose(dropped, ones)
    torch.testing.assert_close(SdpaAttention().attend(q, k, ones, segments, scale=0.3), ones)


@pytest.mark.parametrize("name", ["varlen", "xformers"])
def test_what_cannot_run_on_cpu_says_why(name: str) -> None:
    with pytest.raises(SplitError) as caught:
        choose_backend(name, CPU, torch.float32)
    line = str(caught.value)
    assert line.startswith(f"attention backend '{name}' is unavailable on cpu in torch.float32: ")
    assert "\n" not in line
    assert len(line.rsplit(": ", 1)[1]) > 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_choice_on_cpu(dtype: torch.dtype) -> None:
    assert isinstance(choose_backend("auto", CPU, dtype), SdpaAttention)
    assert isinstance(choose_backend("masked", CPU, dtype), MaskedAttention)


def test_an_unknown_backend_is_named_with_the_nearest() -> None:
    with pytest.raises(SplitError, match=r"no attention is called 'sdap'\. Did you mean sdpa\?"):
        choose_backend("sdap", CPU, torch.float32)


class Broken(AttentionBackend):
    """Runs forward, fails in training: only a probe that goes backward finds it."""

    def _attend(self, q, k, v, segments, *, scale, dropout):
        class Op(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                raise RuntimeError("no backward kernel\nsecond line")

        return Op.apply(v)


def test_the_probe_runs_backward_and_reports_one_line() -> None:
    assert Broken().unavailable(CPU, torch.float32) == "RuntimeError: no backward kernel"
    with torch.no_grad():
        assert Broken().unavailable(CPU, torch.float32) == "RuntimeError: no backward kernel"
    assert SdpaAttention().unavailable(CPU, torch.float32) is None


def test_the_probe_leaves_no_trace_and_works_in_inference_mode() -> None:
    state = torch.get_rng_state()
    with torch.inference_mode():
        assert SdpaAttention().unavailable(CPU, torch.float32) is None
    assert torch.equal(torch.get_rng_state(), state)


@given(cases(largest=6, most_stages=2))
def test_block_diagonal_of_a_layout(case: Case) -> None:
    layout = build_layout(case.splits, case.valid)
    pyramid = random_pyramid(case.grid, case.batch, 4, seed=0)
    segments = pack(pyramid, layout, prefix=torch.zeros(1, 4)).segments
    expected = torch.block_diag(*(torch.ones(n, n) for n in segments.lengths)).bool()
    assert torch.equal(block_diagonal(segments), expected)


@pytest.mark.skipif(importlib.util.find_spec("xformers") is None, reason="xformers is not installed (optional)")
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES)
@pytest.mark.filterwarnings("ignore")
def test_xformers_mask_materialised_is_block_diagonal(lengths: list[int]) -> None:
    from split_core.attention.xformers import block_diagonal_mask

    segments = segments_of(lengths)
    bias = block_diagonal_mask(segments, CPU).materialize((segments.total, segments.total), device="cpu")
    assert torch.equal(bias == 0, block_diagonal(segments))
    assert (bias[~block_diagonal(segments)] == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("name", ["sdpa", "varlen", "xformers"])
@pytest.mark.parametrize("case", CASES)
def test_cuda_backends_are_the_masked_reference(name: str, case: str) -> None:
    try:
        backend = choose_backend(name, torch.device("cuda"), torch.bfloat16)
    except SplitError as reason:
        pytest.skip(str(reason))
    cpu = segments_of(CASES[case])
    segments = Segments(cpu.cu_seqlens.cuda(), cpu.lengths, cpu.max_length)
    inputs = [x.detach().cuda().requires_grad_() for x in qkv(cpu.total, dtype=torch.bfloat16, width=32)]
    outputs, gradients = [], []
    for one in (backend, MaskedAttention()):
        out = one.attend(*inputs, segments, scale=0.3)
        outputs.append(out)
        gradients.append(torch.autograd.grad(out.float().square().sum(), inputs))
    torch.testing.assert_close(*outputs, atol=3e-2, rtol=3e-2)
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, atol=1e-1, rtol=1e-1)
