"""Moments in bf16 and int8, against formulas in float64 and plain Python; equal bits for all implementations."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.native import kernels, moments
from tests.native.states import ISAS, same_bits

SETTINGS = {"lr": 1e-3, "weight_decay": 0.1, "step": 7, "key": 0x0123456789ABCDEF, "grad_scale": 0.7}
BETAS = (0.9, 0.999)
RULES = {"adamw": 2, "lion": 1}
N = 128 * 900 + 77


def gradients(n: int, seed: int = 0) -> Tensor:
    """Return gradients with many magnitudes, like in one model tensor, including zero blocks."""
    r = torch.Generator().manual_seed(seed)
    exponents = torch.randn(n, generator=r) + 2 * torch.randn(-(-n // 128), generator=r).repeat_interleave(128)[:n]
    values = torch.randn(n, generator=r) * 10 ** (exponents - 4)
    values[256:384] = 0
    return values


def empty(states: str, n: int, count: int) -> list[Any]:
    if states == "int8":
        return [(torch.zeros(n, dtype=torch.uint8), torch.zeros(-(-n // 128))) for _ in range(count)]
    return [torch.zeros(n, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[states]) for _ in range(count)]


def step(rule: str, master: Any, moments: list[Any], grad: Tensor, **settings: Any) -> int:
    settings = SETTINGS | {"betas": BETAS} | ({"eps": 1e-8} if rule == "adamw" else {}) | settings
    return int(getattr(kernels, rule)(master, *moments, grad, **settings))


def flatten(moments: list[Any]) -> list[Tensor]:
    return [each for moment in moments for each in (moment if isinstance(moment, tuple) else (moment,))]


def part(moments: list[Any], begin: int, end: int) -> list[Any]:
    blocks = slice(begin // 128, -(-end // 128))
    return [(m[0][begin:end], m[1][blocks]) if isinstance(m, tuple) else m[begin:end] for m in moments]


# -- The generator -----------------------------------------------------------------------------------------------------


def plain_philox(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    """Return Philox output in Python integers (Salmon et al., section 3.3)."""
    c, (k0, k1) = list(counter), key
    for _ in range(7):
        left, right = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [right >> 32 ^ c[1] ^ k0, right % 2**32, left >> 32 ^ c[3] ^ k1, left % 2**32]
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return tuple(c)


ONES = 2**32 - 1
PUBLISHED = [  # kat_vectors from Random123, for seven rounds
    ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    ((ONES,) * 4, (ONES,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
]


@pytest.mark.parametrize(("counter", "key", "wanted"), PUBLISHED)
def test_the_generator_is_philox(counter, key, wanted):
    assert plain_philox(counter, key) == wanted
    found = moments.philox(tuple(torch.tensor([word]) for word in counter), key[0] | key[1] << 32)
    assert tuple(int(word) for word in found) == wanted


def test_a_counter_has_four_words_for_elements_16_apart(isa):
    third, fourth, key = 0x13198A2E, 0x03707344, (0xA4093822, 0x299F31D0)
    for block in (0, 7, 0x85A308D3243F6):
        out = torch.zeros(64, dtype=torch.int32)
        kernels.draw(out, key=key[0] | key[1] << 32, step=third, purpose=fourth, element=64 * block, isa=isa)
        for place in range(16):
            number = 16 * block + place
            wanted = plain_philox((number % 2**32, number >> 32, third, fourth), key)
            assert tuple(int(word) % 2**32 for word in out[place::16]) == wanted


# -- bf16 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_bf16_is_rounded_by_the_drawn_bits(rule, isa):
    """Each step is the fp32 step from widened moments. Rounding adds random bits and drops the low 16 bits."""
    n = 500
    found, weights = empty("bf16", n, RULES[rule]), torch.randn(n)
    grad = gradients(n)
    for number in (1, 2, 3):
        wide, expected = [m.float() for m in found], weights.clone()
        step(rule, expected, wide, grad * number, step=number, isa=isa)
        step(rule, weights, found, grad * number, step=number, element=1280, isa=isa)
        torch.testing.assert_close(weights, expected, rtol=1e-6, atol=1e-9)
        words = []
        for block in range((1280 + n) // 128 + 1):
            drawn = [plain_philox((16 * block + k, 0, number, 0), (0x89ABCDEF, 0x01234567)) for k in range(16)]
            for word in range(4):
                words += [drawn[k][word] & 0xFFFF for k in range(16)] + [drawn[k][word] >> 16 for k in range(16)]
        bits = torch.tensor(words[1280 : 1280 + n], dtype=torch.int32)
        for moment, exact in zip(found, wide, strict=True):
            wanted = (exact.view(torch.int32) + bits) >> 16
            assert torch.equal(moment.view(torch.int16), wanted.to(torch.int16))
        assert not torch.equal(found[0], wide[0].bfloat16())


# -- int8 --------------------------------------------------------------------------------------------------------------


def dynamic_map(is_signed: bool) -> Tensor:
    """Return the value of each code in order, float64: the 8-bit dynamic tree from arXiv:2110.02861.

    Up to 7 bits are exponent bits. Each exponent has the midpoints of equal parts of [0.1, 1].
    """
    numbers = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (exponent + (not is_signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (exponent - 6)
        numbers += [*middles.tolist(), *(-middles if is_signed else middles[:0]).tolist()]
    assert len(numbers) == 256
    return torch.tensor(sorted(numbers), dtype=torch.float64)


def blocks(x: Tensor) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.numel() % 128)).view(-1, 128)


def largest(x: Tensor) -> Tensor:
    return blocks(x).abs().amax(1)


def nearest_codes(x: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return (nearest codes by exhaustive search, whether a second code is almost as near)."""
    scale = largest(x).double().repeat_interleave(128)[: x.numel()]
    ratio = (x.double() / scale).nan_to_num(0.0)
    apart = (ratio[:, None] - numbers).abs()
    near = apart.topk(2, dim=1, largest=False)
    return near.indices[:, 0], near.values[:, 1] - near.values[:, 0] < 1e-6 * ratio.abs()


def decoded(moment: tuple[Tensor, Tensor], is_signed: bool) -> Tensor:
    codes, scale = moment
    return dynamic_map(is_signed)[codes.long()] * scale.double().repeat_interleave(128)[: codes.numel()]


@pytest.mark.parametrize("rule", RULES)
def test_int8_is_the_step_in_float64_and_the_nearest_code(rule, isa):
    """Three steps, each from the codes after the previous step."""
    n = 128 * 40 + 77
    found, weights = empty("int8", n, RULES[rule]), torch.randn(n) * 0.02
    maps = dynamic_map(True), dynamic_map(False)
    for number in (1, 2, 3):
        grad = gradients(n, seed=number)
        old = [decoded(m, k == 0).float() for k, m in enumerate(found)]
        for moment, codes in zip(old, flatten(found)[::2], strict=True):  # the map has a negative zero for zero blocks
            moment[codes == 0] += 0.0
        exact, expected = [m.clone() for m in old], weights.clone()
        step(rule, expected, exact, grad, step=number, isa=isa)
        step(rule, weights, found, grad, step=number, isa=isa)
        sure = torch.ones(n, dtype=torch.bool)
        if rule == "lion":  # the sign can depend on the last bit
            sure = (0.9 * old[0] + 0.1 * grad * 0.7).abs() > 1e-5 * old[0].abs()
        torch.testing.assert_close(weights[sure], expected[sure], rtol=1e-5, atol=1e-7)
        for k, (moment, wanted) in enumerate(zip(found, exact, strict=True)):
            torch.testing.assert_close(moment[1], largest(wanted), rtol=1e-5, atol=0)
            codes, is_close = nearest_codes(wanted, maps[k])
            assert is_close.double().mean() < 0.01
            apart = (codes - moment[0].long()).abs()
            assert apart.max() <= 1
            # Rounded map values move few elements over a border.
            assert (apart[~is_close] != 0).double().mean() < 1e-3


def exact_codes(values: Tensor, is_signed: bool, isa: str | None) -> tuple[Tensor, Tensor]:
    """Return (codes, scales) for given numbers, from an AdamW step with the gradient and its square as moments."""
    n = values.numel()
    grad = values if is_signed else values.double().sqrt().float()
    moments = empty("int8", n, 2)
    step("adamw", torch.zeros(n), moments, grad, betas=(0.0, 0.0), grad_scale=1.0, isa=isa)
    return moments[0 if is_signed else 1]


@pytest.mark.parametrize("is_signed", [True, False])
def test_int8_gives_every_number_of_its_map_back(is_signed, isa):
    numbers = dynamic_map(is_signed).float()
    halves = torch.cat([numbers[:128], numbers[128:]])
    halves[0] = -1.0 if is_signed else 1.0  # each block gets scale 1
    codes, scales = exact_codes(halves, is_signed, isa)
    assert scales.tolist() == [1.0, 1.0]
    assert torch.equal(codes[1:].long(), torch.arange(1, 256))
    assert codes[0] == (0 if is_signed else 255), "there is no -1"


def test_int8_takes_the_farther_of_two_that_are_equally_near(isa):
    numbers = dynamic_map(True)
    for low in (128, 131, 190, 191, 222, 253, 254):
        middle = (numbers[low] + numbers[low + 1]) / 2
        values = torch.stack([numbers[255], middle * (1 - 1e-6), middle * (1 + 1e-6)]).float()
        codes, _ = exact_codes(torch.cat([values, -values[1:]]), True, isa)
        assert codes.tolist()[:3] == [255, low, low + 1]
        assert codes.tolist()[3:] == [254 - low, max(254 - low - 1, 0)], "there is no -1"
    half = float(numbers[128].float()) / 2  # midpoint between 0 and the smallest number
    codes, _ = exact_codes(torch.tensor([1.0, half, half * 0.9999, -half, -half * 0.9999]), True, isa)
    assert codes.tolist() == [255, 128, 127, 126, 127]


@pytest.mark.parametrize("at", [3, 130, 200])
def test_int8_of_what_is_not_finite_is_not_finite(at, isa):
    for wrong in (float("nan"), float("inf"), -float("inf")):
        grad, moments = gradients(205), empty("int8", 205, 2)
        grad[at] = wrong
        weights = torch.ones(205)
        assert step("adamw", weights, moments, grad, isa=isa) == 1
        block = slice(at // 128 * 128, at // 128 * 128 + 128)
        for codes, scale in moments:
            assert scale.isnan().tolist() == [at < 128, at >= 128]
            assert codes[block].unique().numel() == 1
        assert step("adamw", weights, moments, torch.zeros(205), isa=isa) == (128 if at < 128 else 77)


def test_int8_of_less_than_the_least_normal_number_is_zero(isa):
    values = torch.zeros(384)
    values[1], values[130], values[131] = 1.1e-38, 1.2e-38, -1e-40
    moments = empty("int8", 384, 1)
    step("lion", torch.zeros(384), moments, values, betas=(0.9, 0.0), grad_scale=1.0, isa=isa)
    codes, scales = moments[0]
    assert scales.tolist() == [0.0, values[130].item(), 0.0]
    wanted, _ = nearest_codes(values[128:256], dynamic_map(True))
    assert torch.equal(codes[128:256].long(), wanted)
    assert codes[:128].eq(127).all()
    assert codes[256:].eq(127).all()
    before = torch.ones(384)
    step("lion", before, empty("int8", 384, 1), torch.zeros(384), weight_decay=0.0, isa=isa)
    assert torch.equal(before, torch.ones(384)), "no state is no step"


@pytest.mark.parametrize("is_signed", [True, False])
def test_int8_is_that_of_bitsandbytes(is_signed):
    """For doubles bitsandbytes searches all map values. The C++ CPU code (0.50) for floats is not compared.

    That code is coarse below a hundredth of the scale.
    """
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed: nothing to compare with")
    from bitsandbytes import functional

    values = gradients(128 * 800) if is_signed else gradients(128 * 800).square()
    code = functional.create_dynamic_map(is_signed)
    values[::128] += 1e-3  # avoids division by 0 in zero blocks
    theirs, scale = torch.ops.bitsandbytes.quantize_blockwise(values.double(), code.double(), 128)
    codes, scales = exact_codes(values, is_signed, None)
    torch.testing.assert_close(scales, scale.float().view(-1), rtol=1e-6, atol=0)
    apart = (codes.int() - theirs.view(-1).int()).abs()
    print(f"{bitsandbytes.__version__}: equal in {(apart == 0).double().mean():.6f}")
    assert apart.max() <= 1
    assert (apart == 0).double().mean() > 0.999


# -- Equal bits
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("states", ["bf16", "int8"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n", [0, 1, 127, 128, 129, 3 * (1 << 16) + 4_097])
def test_isas_threads_pieces_masters_and_the_fallback_give_the_same_bits(n, rule, states, monkeypatch):
    start = torch.randn(n, generator=torch.Generator().manual_seed(n)) * 0.02
    grads = [gradients(max(n, 400), seed=number)[:n].bfloat16() for number in range(2)]
    if n > 128:
        grads[1][100] = float("nan")

    def trained(cuts: list[int], is_split: bool, is_bf16: bool, **how: Any) -> list[Tensor]:
        weights, moments, counts = start.clone(), empty(states, n, RULES[rule]), 0
        master = kernels.split(weights) if is_split else weights
        for number, grad in enumerate(grads):
            grad = grad if is_bf16 else grad.float()
            for a, b in pairwise(cuts):
                piece = tuple(half[a:b] for half in master) if is_split else master[a:b]
                place = {"element": 1024 + a, "step": 1 + number}
                counts += step(rule, piece, part(moments, a, b), grad[a:b], **place, **how)
        found = [kernels.join(*master) if is_split else weights, *flatten(moments)]
        return [torch.tensor(counts), *(x.float() if x.dtype == torch.bfloat16 else x for x in found)]

    wanted = trained([0, n], False, False, isa=ISAS[-1], threads=1)
    assert wanted[0] == (1 if n > 128 else 0)

    def check(found: list[Tensor], how: object) -> None:
        assert all(same_bits(x, y) for x, y in zip(found, wanted, strict=True)), how

    for isa in ISAS:
        for threads in (1, 3):
            for is_split, is_bf16 in ((False, True), (True, False), (True, True)):
                check(trained([0, n], is_split, is_bf16, isa=isa, threads=threads), (isa, threads, is_split, is_bf16))
    if n > 128:
        check(trained([0, 128, n // 256 * 128 + 128, n], True, True), "pieces")
    monkeypatch.setattr(kernels, "_core", None)
    check(trained([0, n], False, False), "torch")
    check(trained([0, n], True, True), "torch")


@pytest.mark.parametrize("states", ["bf16", "int8"])
def test_nothing_beyond_the_range_is_written(states, isa):
    for n in (1, 15, 33, 127, 200):
        length = 128 + n + 64
        weights = torch.randn(length)
        hi, lo = kernels.split(weights)
        m, v = empty(states, length, 2)
        for each in flatten([m, v]):
            each.fill_(1)
        before = [each.clone() for each in (hi, lo, *flatten([m, v]))]
        window = slice(128, 128 + n)
        step(
            "adamw",
            (hi[window], lo[window]),
            part([m, v], 128, 128 + n),
            gradients(n + 400)[:n],
            isa=isa,
            betas=(0.5, 0.5),
        )
        for now, then in zip((hi, lo, *flatten([m, v])), before, strict=True):
            size = 128 if now.numel() == length else 1
            last = size + (n if size > 1 else -(-n // 128))
            assert torch.equal(now[:size], then[:size])
            assert torch.equal(now[last:], then[last:])
            assert then is before[0] or not torch.equal(now, then)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"exp_avg": torch.ones(256)}, "exp_avg and exp_avg_sq are bf16 and fp32; they must have the same dtype"),
        ({"element": 64}, "element is 64; .* a multiple of 128"),
        ({"key": -1}, "key is -1"),
        ({"exp_avg": (torch.ones(256, dtype=torch.uint8), torch.ones(3))}, "are bf16 and int8"),
    ],
)
def test_a_wrong_argument_is_named(wrong, message):
    arrays = dict(zip(("exp_avg", "exp_avg_sq"), empty("bf16", 256, 2), strict=True)) | {"master": torch.ones(256)}
    with pytest.raises(ConfigError, match=message):
        kernels.adamw(**(arrays | {"grad": torch.ones(256), "betas": BETAS, "eps": 1e-8} | SETTINGS | wrong))


def test_a_wrong_scale_is_named():
    codes, right = torch.zeros(300, dtype=torch.uint8), torch.zeros(3)
    for scale, message in ((torch.zeros(2), "scale has 2 elements.* 3, one per 128"), (right.half(), "float16")):
        with pytest.raises(ConfigError, match=f"^exp_avg.*{message}"):
            step("lion", torch.ones(300), [(codes, scale)], torch.ones(300))
