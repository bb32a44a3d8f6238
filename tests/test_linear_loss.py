"""fastppo.linear_loss and linear_ppo_loss against their definitions in float64: loss, metrics, every gradient, rows."""

import inspect
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fastppo
from fastppo import PPO_METRICS, linear_logprob, linear_loss, linear_ppo_loss
from fastppo.ops import _linear
from fastppo.ops.linear_loss import default_chunk
from fastppo.reference.linear_loss import linear_loss as plain_loss
from fastppo.reference.linear_ppo_loss import linear_ppo_loss as plain_ppo_loss
from fastppo.testing import assert_bitwise_equal, assert_no_worse, make_loss_inputs
from tests.linear import make_head, memory_of, small_chunks

LENGTHS = [5, 7, 0, 12, 1, 6]  # an empty sequence, one of one token, one longer than the small chunks
T, V = sum(LENGTHS), 29
NAMES = ("loss", "metrics", "logprobs", "entropy", "dhidden", "dweight", "dbias")


def problem(dtype=torch.float32, **options):
    head = make_head(T, V, dtype=dtype)
    head.targets[4] = -100
    return head, make_loss_inputs(LENGTHS, **options)


def run_ppo(op, head, x, *, upstream=1.0, mask=True, cu=True, double=False, **options):
    """Everything that comes out, and the gradients of hidden, weight and bias of upstream * loss."""
    to = (lambda v: v.double() if v is not None and v.is_floating_point() else v) if double else (lambda v: v)
    leaves = [to(v.detach()).clone().requires_grad_() for v in head[:3]]
    options = {k: to(v) if isinstance(v, Tensor) else v for k, v in options.items()}
    out = op(
        leaves[0],
        leaves[1],
        head.targets,
        to(options.pop("old_logprobs", x.old_logprobs)),
        to(x.advantages),
        mask=x.mask if mask else None,
        bias=leaves[2],
        cu_seqlens=x.cu_seqlens if cu else None,
        **options,
    )
    loss, metrics, logprobs, entropy = out
    grads = torch.autograd.grad(loss * upstream, leaves)
    return [loss.detach(), metrics, logprobs, entropy, *grads]


def options_of(x):
    """Every option of ppo_loss, at least once each."""
    ref, rollout = {"ref_logprobs": x.ref_logprobs}, {"rollout_logprobs": x.rollout_logprobs}
    return {
        "default": {},
        "clip": {"clip_eps": 0.05, "clip_eps_high": 0.4, "dual_clip": 1.5},
        "ratio_1": {"old_logprobs": None},
        "reinforce": {"loss_type": "reinforce"},
        "cispo": {"loss_type": "cispo"},
        "gspo": {"loss_type": "gspo", "aggregation": "seq_mean_token_mean"},
        "gmpo": {"loss_type": "gmpo"},
        "sapo": {"loss_type": "sapo", "sapo_tau": (1.0, 2.0)},
        "entropy": {"ent_coef": 0.1},
        "kl": ref | {"kl_coef": 0.3, "kl_type": "k2"},
        "kl_pathwise": ref | {"kl_coef": 0.3, "kl_grad": "pathwise"},
        "tis": rollout | {"is_correction": "tis", "is_bounds": (0.5, 1.2)},
        "icepop": rollout | {"is_correction": "icepop"},
        "seq_mask_tis": rollout | {"is_correction": "seq_mask_tis", "is_bounds": (0.98, 1.02)},
        "nll": {"nll_coef": 0.5, "nll_mask": x.advantages > 0},
        "nll_count": {"nll_coef": 0.5, "nll_mask": x.advantages > 0, "num_nll_tokens": 50, "num_tokens": 70},
        "seq_mean_token_mean": {"aggregation": "seq_mean_token_mean"},
        "seq_mean_token_sum": {"aggregation": "seq_mean_token_sum"},
        "token_sum_norm": {"aggregation": "token_sum_norm", "norm": 7.0, "num_seqs": 11},
        "counts": {"num_tokens": torch.tensor(100), "num_seqs": 9},
    }


OPTIONS = options_of(make_loss_inputs(LENGTHS))
WAYS = {
    "default": {},
    "small": {"chunk_tokens": 4},
    "medium": {"chunk_tokens": 12},
    "off": {"chunk_tokens": 5, "compact": "off"},
    "num_rows": {"num_rows": "counted"},
}


@pytest.mark.filterwarnings("ignore:a sequence is longer")
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_option_and_every_way_through_is_no_worse_than_pytorch(options, way):
    head, x = problem()
    rows = int((x.mask & (head.targets != -100)).sum())
    way = {k: rows if v == "counted" else v for k, v in way.items()}
    got = run_ppo(linear_ppo_loss, head, x, upstream=1.5, **options, **way)
    baseline = run_ppo(plain_ppo_loss, head, x, upstream=1.5, **options)
    truth = run_ppo(plain_ppo_loss, head, x, upstream=1.5, double=True, **options)
    for name, a, b, c in zip(NAMES, got, baseline, truth, strict=True):
        atol = None
        if name == "loss":  # a sum that cancels: one rounding of the metrics' largest sum
            atol = 2e-7 * float(truth[1].abs().max()) / min(70, rows)
        elif name in NAMES[4:]:  # logits are up to 8: their last bit, which a chunk's size decides, is that much of p
            atol = 4 * torch.finfo(torch.float32).eps * float(c.abs().max())
        assert_no_worse(name, a.float(), b, c, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["f32", "bf16", "f16"])
@pytest.mark.parametrize("chunk_tokens", [None, 9])
def test_dtypes(dtype, chunk_tokens):
    head, x = problem(dtype)
    options = {"ent_coef": 0.1, "softcap": 5.0, "temperature": torch.linspace(0.5, 2, T)}
    got = run_ppo(linear_ppo_loss, head, x, chunk_tokens=chunk_tokens, **options)
    baseline, truth = (run_ppo(plain_ppo_loss, head, x, double=double, **options) for double in (False, True))
    assert [v.dtype for v in got] == [torch.float32, torch.float64] + [torch.float32] * 2 + [dtype] * 3
    for name, a, b, c in zip(NAMES, got, baseline, truth, strict=True):
        if name in ("dhidden", "dweight", "dbias", "logprobs", "entropy"):
            assert_no_worse(name, a, b, c)


@pytest.mark.parametrize("rows", [0, 1, 3, 131])
@pytest.mark.parametrize("vocab", [1, 7, 257])
def test_shapes(rows, vocab):
    head, x = make_head(rows, vocab), make_loss_inputs([rows])
    for chunk_tokens in (None, 32):
        got = run_ppo(linear_ppo_loss, head, x, chunk_tokens=chunk_tokens)
        truth = run_ppo(plain_ppo_loss, head, x, double=True)
        for name, a, b in zip(NAMES, got, truth, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_padded_equals_packed():
    lengths, width = [3, 5, 1], 5
    head, x = make_head(9, V), make_loss_inputs(lengths)
    place = torch.cat([i * width + torch.arange(n) for i, n in enumerate(lengths)])

    def pad(v, fill):
        return v.new_full((15, *v.shape[1:]), fill).index_copy_(0, place, v).view(3, width, *v.shape[1:])

    padded_head = type(head)(pad(head.hidden, math.nan), *head[1:3], pad(head.targets, 0))
    padded = x._replace(
        old_logprobs=pad(x.old_logprobs, math.nan), advantages=pad(x.advantages, math.nan), mask=pad(x.mask, False)
    )
    for options in ({}, {"loss_type": "gspo"}, {"aggregation": "seq_mean_token_mean"}):
        a = run_ppo(linear_ppo_loss, padded_head, padded, cu=False, **options)
        b = run_ppo(linear_ppo_loss, head, x, **options)
        assert a[2].shape == (3, width)
        for name, got, expected in zip(NAMES, a, b, strict=True):
            got = got.flatten(0, 1)[place] if name in ("logprobs", "entropy", "dhidden") else got
            if name == "metrics":
                expected[PPO_METRICS.index("seqs")] = got[PPO_METRICS.index("seqs")]
            assert_bitwise_equal(name, got, expected)


def test_it_takes_all_keywords_of_ppo_loss_but_entropy():
    ppo = set(inspect.signature(fastppo.ppo_loss).parameters) - {"logprobs", "entropy"}
    head = set(inspect.signature(fastppo.linear_logprob).parameters) - {"memory"}
    own = {"chunk_tokens", "compact", "num_rows"}
    assert set(inspect.signature(linear_ppo_loss).parameters) == ppo | head | own
    for name, parameter in inspect.signature(fastppo.ppo_loss).parameters.items():
        if name not in ("logprobs", "entropy", "advantages"):
            assert inspect.signature(linear_ppo_loss).parameters[name].default == parameter.default


# -- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", ["auto", "off"])
@pytest.mark.parametrize("chunk_tokens", [None, 4])
def test_unselected_rows_reach_nothing(compact, chunk_tokens):
    """NaN in the hidden states and every per-token input of a row that does not count changes no bit."""
    head, x = problem()
    out = ~x.mask
    assert bool(out.any())
    options = {"ref_logprobs": x.ref_logprobs, "kl_coef": 0.1, "ent_coef": 0.1, "compact": compact}
    clean = run_ppo(linear_ppo_loss, head, x, chunk_tokens=chunk_tokens, **options)
    dirty_head = type(head)(head.hidden.masked_fill(out[:, None], math.nan), *head[1:])
    floats = {k: v.masked_fill(out, math.nan) for k, v in x._asdict().items() if v.is_floating_point()}
    options["ref_logprobs"] = floats["ref_logprobs"]
    dirty = run_ppo(linear_ppo_loss, dirty_head, x._replace(**floats), chunk_tokens=chunk_tokens, **options)
    for name, a, b in zip(NAMES, dirty, clean, strict=True):
        assert_bitwise_equal(name, a, b)
    for i in (2, 3, 4):
        assert bool((clean[i][out] == 0).all()), NAMES[i]


@pytest.mark.parametrize("compact, expected", [("auto", 4), ("off", 12)])
def test_rows_whose_coefficients_are_zero_are_left_out_of_the_gradients_products(monkeypatch, compact, expected):
    """Zero advantages: no gradient without KL and entropy, and then no product."""
    seen = []
    add = _linear.Gradients.add

    def record(self, dlogits, *rest, **options):
        seen.append(dlogits.shape[0])
        add(self, dlogits, *rest, **options)

    monkeypatch.setattr(_linear.Gradients, "add", record)
    head, x = make_head(12, 7), make_loss_inputs([12], selected=1.0, spread=0.01)
    x.advantages[4:] = 0
    got = run_ppo(linear_ppo_loss, head, x, compact=compact)
    assert sum(seen) == expected
    assert bool((got[4][4:] == 0).all()) and bool((got[4][:4] != 0).any(1).all())
    seen.clear()
    with_entropy = run_ppo(linear_ppo_loss, head, x, compact=compact, ent_coef=0.1)
    assert sum(seen) == 12 and bool((with_entropy[4] != 0).any(1).all()), "an entropy term gives them one"


def test_compaction_changes_no_bit_of_a_rows_gradient_beyond_the_products_own():
    head, x = problem()
    a, b = (run_ppo(linear_ppo_loss, head, x, compact=compact) for compact in ("auto", "off"))
    for name, got, expected in zip(NAMES, a, b, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8, msg=name)


def test_nothing_selected_gives_zeros():
    head, x = problem()
    nothing = x._replace(mask=torch.zeros_like(x.mask))
    for options in ({}, {"loss_type": "gspo"}, {"compact": "off"}, {"num_tokens": 0}, {"ent_coef": 0.3}):
        for name, v in zip(NAMES, run_ppo(linear_ppo_loss, head, nothing, **options), strict=True):
            assert bool((v == 0).all()), name
    head.targets.fill_(-100)
    assert all(bool((v == 0).all()) for v in run_ppo(linear_ppo_loss, head, x, mask=False))


def test_ignored_targets_do_not_count():
    """Four rows, two of them ignored: the mean divides by 2."""
    head, x = make_head(4, 7), make_loss_inputs([4], selected=1.0)
    head.targets[1:3] = -100
    got = run_ppo(linear_ppo_loss, head, x, mask=False, old_logprobs=None, cu=False)
    assert got[0].item() == pytest.approx(-float(x.advantages[[0, 3]].sum()) / 2, rel=1e-6)
    assert got[1][0].item() == 2


# -- counts and chunks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"ent_coef": 0.1}, {"aggregation": "seq_mean_token_sum", "num_seqs": 6}], ids=str
)
def test_micro_batches_add_up_to_the_whole(options):
    head, x = problem()
    count = int((x.mask & (head.targets != -100)).sum())
    whole = run_ppo(linear_ppo_loss, head, x, num_tokens=count, **options)
    total = None
    for first, last in ((0, 2), (2, 4), (4, 6)):
        a, b = (int(x.cu_seqlens[i]) for i in (first, last))
        part = x._replace(
            **{k: v[a:b] for k, v in x._asdict().items() if k != "cu_seqlens"},
            cu_seqlens=x.cu_seqlens[first : last + 1] - a,
        )
        got = run_ppo(
            linear_ppo_loss,
            type(head)(head.hidden[a:b], *head[1:3], head.targets[a:b]),
            part,
            num_tokens=count,
            **options,
        )
        torch.testing.assert_close(got[4], whole[4][a:b], rtol=1e-5, atol=1e-8)
        total = got if total is None else [p + q if p.shape == q.shape else p for p, q in zip(total, got, strict=True)]
    for i in (0, 1, 5, 6):
        torch.testing.assert_close(total[i], whole[i], rtol=1e-6, atol=1e-6, msg=NAMES[i])


def test_a_sequence_longer_than_a_chunk_is_said_and_right():
    head, x = problem()
    with pytest.warns(UserWarning, match="four products instead of three"):
        got = run_ppo(linear_ppo_loss, head, x, loss_type="gspo", chunk_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = run_ppo(linear_ppo_loss, head, x, loss_type="gspo", chunk_tokens=12)
        run_ppo(linear_ppo_loss, head, x, chunk_tokens=4)  # a loss of tokens has no need of it
    for name, a, b in zip(NAMES, got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)


def test_the_default_chunk():
    """On a GPU 151936 columns are cut at 3533 rows, but where a float32 dweight would take what that saves."""
    gpu, cpu = torch.device("cuda"), torch.device("cpu")

    def chunk(count, trained, device=gpu, *, even=True, columns=151936):
        return default_chunk(count, columns, trained, device, even=even)

    assert chunk(3533, 0) == 3533
    assert chunk(3533 + 4096, 4096) == 3533 + 4096
    assert chunk(3533 + 4097, 4096) == 3815  # two parts
    assert chunk(7000, 0) == 3500 and chunk(7000, 0, even=False) == 3533
    assert chunk(600, 4096, cpu) == chunk(600, 0, cpu) == 300
    assert chunk(0, 4096) == 1


@pytest.mark.parametrize("result", [1, 3], ids=["one", "three"])
def test_loss_fn_must_return_a_pair(result):
    head, x = problem()
    total = torch.zeros(())
    with pytest.raises(TypeError, match=r"loss_fn must return a pair \(loss, metrics\), got (Tensor|tuple)"):
        linear_loss(*head[:2], head.targets, lambda *_: total if result == 1 else (total,) * 3)


def test_the_number_of_products(monkeypatch):
    """Forward ones: one per chunk, twice that for a sequence longer than a chunk; none of a gradient under no_grad."""
    calls = []
    for cls, name in ((_linear.Product, "logits"), (_linear.Gradients, "add")):
        original = getattr(cls, name)
        monkeypatch.setattr(
            cls, name, lambda self, *a, _f=original, _n=name, **k: (calls.append(_n), _f(self, *a, **k))[1]
        )
    head, x = make_head(12, 7), make_loss_inputs([12], selected=1.0)

    def counted(**options):
        calls.clear()
        run_ppo(linear_ppo_loss, head, x, **options)
        return calls.count("logits"), calls.count("add")

    assert counted(chunk_tokens=4, ent_coef=0.1) == (3, 3)
    assert counted(ent_coef=0.1) == (1, 1)
    with pytest.warns(UserWarning, match="four products"):
        assert counted(chunk_tokens=4, loss_type="gspo", ent_coef=0.1) == (6, 3)
    calls.clear()
    with torch.no_grad():
        out = linear_ppo_loss(*head[:2], head.targets, x.old_logprobs, x.advantages, chunk_tokens=4)
    assert calls == ["logits"] * 3 and not out.loss.requires_grad


def test_a_large_token_count_does_not_flush_float16_gradients():
    """1/num_tokens times a probability would be below float16's range; the weight's float32 gradient has it."""
    head, x = problem()
    half = type(head)(*(v.half() for v in head[:3]), head.targets)
    weight = half.weight.float()

    def dweight(op, hidden, leaf, advantages, **options):
        leaf = leaf.clone().requires_grad_()
        loss = op(hidden, leaf, head.targets, None, advantages, num_tokens=1e9, **options).loss
        return torch.autograd.grad(loss, leaf)[0]

    truth = dweight(linear_ppo_loss, half.hidden.double(), weight.double(), x.advantages.double())
    assert 0 < float(truth.abs().max()) < 1e-7
    with torch.autocast("cpu", dtype=torch.float16):
        got = dweight(linear_ppo_loss, half.hidden, weight, x.advantages)
        generic = torch.autograd.grad(
            linear_loss(
                half.hidden,
                (leaf := weight.clone().requires_grad_()),
                head.targets,
                lambda logprobs, entropy, rows: ((-rows["a"] * logprobs).sum() / 1e9, rows["a"].sum()),
                rows={"a": x.advantages},
            ).loss,
            leaf,
        )[0]
    for g in (got, generic):
        assert float((g - truth).abs().max()) < 4e-3 * float(truth.abs().max())


# -- any loss ---------------------------------------------------------------------------------------------------------


def weighted(logprobs, entropy, rows):
    """A loss of its own: focal in the log-prob, a weight per row, an entropy bonus."""
    loss = (-(rows["weight"] * (1 - logprobs.exp()) ** 2 * logprobs)).sum() / 17
    if entropy is not None:
        loss = loss - 0.1 * (entropy * rows["pair"].sum(-1)).sum() / 17
    return fastppo.ops._loss.LossOutput(loss, torch.stack([logprobs.sum(), rows["weight"].sum()]).double())


@pytest.mark.parametrize("with_entropy", [True, False])
@pytest.mark.parametrize("chunk_tokens", [None, 3])
def test_any_loss_of_the_rows(chunk_tokens, with_entropy):
    head, x = problem()
    rows = {"weight": x.values, "pair": torch.randn(T, 2, generator=torch.Generator().manual_seed(2))}
    results = []
    for op, double in ((linear_loss, False), (plain_loss, False), (plain_loss, True)):
        leaves = [(v.double() if double else v).clone().requires_grad_() for v in head[:3]]
        chunk = {"chunk_tokens": chunk_tokens} if op is linear_loss else {}
        given = {k: v.double() if double else v for k, v in rows.items()}
        out = op(*leaves[:2], head.targets, weighted, rows=given, mask=x.mask, bias=leaves[2],
                 with_entropy=with_entropy, **chunk)  # fmt: skip
        assert (out[3] is None) == (not with_entropy)
        outputs = [out[0].detach(), out[1], out[2]]
        results.append(outputs + list(torch.autograd.grad(out[0], leaves)))
    for name, a, b, c in zip(("loss", "metrics", "logprobs", *NAMES[4:]), *results, strict=True):
        assert_no_worse(name, a.float(), b.float(), c, atol=2e-6 if name in ("loss", "metrics") else None)


def test_what_loss_fn_is_given():
    head, x = problem()
    seen = []

    def loss_fn(logprobs, entropy, rows):
        seen.append((logprobs.shape[0], rows))
        return logprobs.sum(), logprobs.detach().sum()

    counted = x.mask & (head.targets != -100)
    ids = torch.arange(T)
    with torch.no_grad():
        out = linear_loss(*head[:2], head.targets, loss_fn, rows={"id": ids}, mask=x.mask, chunk_tokens=5)
    assert [n for n, _ in seen[:-1]] == [5] * (len(seen) - 1)
    assert torch.cat([r["id"] for _, r in seen]).tolist() == ids[counted].tolist()
    assert all(set(r) == {"id", "mask"} and bool(r["mask"].all()) for _, r in seen)
    assert out.loss.item() == pytest.approx(out.logprobs.sum().item(), rel=1e-5)
    seen.clear()
    with torch.no_grad():
        linear_loss(*head[:2], head.targets, loss_fn, rows={"id": ids}, mask=x.mask, chunk_tokens=12,
                    cu_seqlens=x.cu_seqlens)  # fmt: skip
    lengths = []
    for n, r in seen:
        assert r["cu_seqlens"][0] == 0 and r["cu_seqlens"][-1] == n <= 12
        lengths += r["cu_seqlens"].diff().tolist()
    per_sequence = [int(counted[a:b].sum()) for a, b in zip(x.cu_seqlens[:-1], x.cu_seqlens[1:], strict=True)]
    assert lengths == per_sequence and len(seen) > 1
    seen.clear()
    with torch.no_grad():
        linear_loss(*head[:2], head.targets, loss_fn, rows={"id": ids}, mask=x.mask, compact="off")
    assert seen[0][0] == T and seen[0][1]["mask"].tolist() == counted.tolist()


def test_a_constant_loss_and_one_of_part_of_the_inputs():
    head, _ = problem()
    hidden = head.hidden.clone().requires_grad_()
    out = linear_loss(hidden, head.weight, head.targets, lambda lp, h, r: (lp.new_zeros(()), lp.new_zeros(2)))
    assert bool((torch.autograd.grad(out.loss, hidden)[0] == 0).all())


# -- autograd, memory -------------------------------------------------------------------------------------------------


def test_only_the_loss_is_differentiable_and_once():
    head, x = problem()
    hidden = head.hidden.clone().requires_grad_()
    out = linear_ppo_loss(hidden, head.weight, head.targets, x.old_logprobs, x.advantages)
    assert out.loss.requires_grad and not any(v.requires_grad for v in out[1:])
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="linear_loss .linear_ppo_loss. has no second backward"):
        out.loss.backward()
    out = linear_ppo_loss(hidden, head.weight, head.targets, x.old_logprobs, x.advantages)
    with pytest.raises(RuntimeError, match='no second derivative.*backend="torch"'):
        torch.autograd.grad(out.loss, hidden, create_graph=True)


def test_torch_backend_has_second_derivatives_and_float64_is_the_reference():
    head, x = make_head(5, 7), make_loss_inputs([2, 3], selected=1.0, dtype=torch.float64)
    inputs = [v.double().requires_grad_() for v in head[:3]]

    def f(hidden, weight, bias, backend="torch"):
        return linear_ppo_loss(
            hidden, weight, head.targets, x.old_logprobs, x.advantages, bias=bias, ent_coef=0.1, loss_type="reinforce",
            backend=backend,
        ).loss  # fmt: skip

    assert f(*inputs).dtype == torch.float64
    assert torch.autograd.gradgradcheck(f, inputs)
    assert torch.autograd.gradcheck(lambda *a: f(*a, backend="auto"), inputs)


def test_frozen_parts_and_weight_grad_into(monkeypatch):
    made = []
    original = _linear.Gradients._add_weight
    monkeypatch.setattr(_linear.Gradients, "_add_weight", lambda self, *a: (made.append(1), original(self, *a)))
    head, x = problem()
    expected = run_ppo(linear_ppo_loss, head, x, upstream=2.0)
    made.clear()
    hidden = head.hidden.clone().requires_grad_()
    args = (head.targets, x.old_logprobs, x.advantages)
    linear_ppo_loss(hidden, head.weight, *args, bias=head.bias, mask=x.mask).loss.mul(2).backward()
    assert not made
    assert_bitwise_equal("dhidden", hidden.grad, expected[4])
    weight, into = head.weight.clone().requires_grad_(), torch.full((V, 8), 3.0)
    linear_ppo_loss(hidden, weight, *args, bias=head.bias, mask=x.mask, weight_grad_into=into).loss.mul(2).backward()
    assert weight.grad is None
    torch.testing.assert_close(into - 3, expected[5], rtol=1e-5, atol=1e-6)


def test_autocast():
    head, x = problem()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = run_ppo(linear_ppo_loss, head, x, chunk_tokens=7)
        plain = run_ppo(linear_ppo_loss, head, x, backend="torch")
    truth = run_ppo(plain_ppo_loss, head, x, double=True)
    assert all(v.dtype == torch.float32 for v in got[4:])
    for i in (2, 3, 4, 5, 6):
        assert_no_worse(NAMES[i], got[i], plain[i], truth[i], atol=2**-9 * float(truth[i].abs().max()))


def test_no_tensor_of_tokens_times_vocabulary():
    """Tokens enough for several default chunks: forward and backward never hold the logits, in one piece or in all."""
    tokens, vocab = 6000, 3000
    head, x = make_head(tokens, vocab), make_loss_inputs([tokens], selected=1.0)
    logits = tokens * vocab * 4
    hidden, weight = head.hidden.clone().requires_grad_(), head.weight.clone().requires_grad_()
    fused = memory_of(
        lambda: linear_ppo_loss(hidden, weight, head.targets, x.old_logprobs, x.advantages).loss.backward()
    )
    assert fused.largest < 0.6 * logits and fused.peak < 0.8 * logits
    small = memory_of(
        lambda: linear_ppo_loss(
            hidden, weight, head.targets, x.old_logprobs, x.advantages, chunk_tokens=500
        ).loss.backward()
    )
    assert small.largest < 0.1 * logits and small.peak < 0.3 * logits
    plain = memory_of(lambda: plain_ppo_loss(hidden, weight, head.targets, x.old_logprobs, x.advantages)[0].backward())
    assert plain.largest >= logits and plain.peak > 2 * logits


def test_chunks_follow_the_vocabulary_and_are_even():
    cpu = torch.device("cpu")
    for vocab in (49152, 151936):
        assert [_linear.chunk_rows(n, vocab, cpu) for n in (0, 1, 383, 384, 512, 1000)] == [1, 1, 383, 192, 256, 250]
    assert _linear.chunk_rows(100000, 1024, cpu) == -(-100000 // 12)
    assert _linear.chunk_rows(5, 0, cpu) == 5


def test_compiles_whole():
    head, x = problem()

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear_ppo_loss(
            hidden, weight, head.targets, x.old_logprobs, x.advantages, mask=x.mask, bias=bias, ent_coef=0.1
        ).loss

    eager, compiled = ([v.clone().requires_grad_() for v in head[:3]] for _ in range(2))
    loss(*eager).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(*compiled).backward()
    for name, a, b in zip(NAMES[4:], compiled, eager, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7, msg=name)


def test_default_chunks_equal_one_chunk(monkeypatch):
    head, x = problem()
    one = run_ppo(linear_ppo_loss, head, x)
    small_chunks(monkeypatch, 4)
    for name, a, b in zip(NAMES, run_ppo(linear_ppo_loss, head, x), one, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, msg=name)


# -- errors -----------------------------------------------------------------------------------------------------------

HEAD, X = make_head(6, 5), make_loss_inputs([4, 2])


def generic(**change):
    options = {"loss_fn": lambda lp, h, r: (lp.sum(), lp.sum())} | change
    return linear_loss(HEAD.hidden, HEAD.weight, HEAD.targets, options.pop("loss_fn"), **options)


def ppo(**change):
    options = {"old_logprobs": X.old_logprobs, "advantages": X.advantages, "weight": HEAD.weight} | change
    weight, old, advantages = (options.pop(k) for k in ("weight", "old_logprobs", "advantages"))
    return linear_ppo_loss(HEAD.hidden, weight, HEAD.targets, old, advantages, **options)


ERRORS = {
    "chunk_zero": (generic, {"chunk_tokens": 0}, ValueError, "chunk_tokens must be >= 1, got 0"),
    "chunk_float": (generic, {"chunk_tokens": 2.0}, TypeError, "chunk_tokens must be an int or None, got float"),
    "compact": (generic, {"compact": "on"}, ValueError, "compact must be one of 'auto', 'off', got 'on'"),
    "num_rows": (generic, {"num_rows": 5}, ValueError, "num_rows must be the 6 rows that count, got 5"),
    "num_rows_negative": (generic, {"num_rows": -1}, ValueError, "num_rows must be an int >= 0, got -1"),
    "rows_type": (generic, {"rows": [X.values]}, TypeError, "rows must be a mapping of names to tensors, got list"),
    "rows_shape": (
        generic, {"rows": {"a": torch.zeros(5)}}, ValueError, r"rows\['a'\] must begin with.*\[6\], got \[5\]"
    ),
    "rows_reserved": (generic, {"rows": {"mask": X.mask}}, ValueError, "rows must not hold 'mask'"),
    "rows_grad": (
        generic, {"rows": {"a": torch.zeros(6, requires_grad=True)}}, ValueError, r"rows\['a'\] must not require grad"
    ),
    "mask_shape": (generic, {"mask": torch.ones(5)}, ValueError, r"mask must have targets's shape \[6\], got \[5\]"),
    "cu_seqlens": (generic, {"cu_seqlens": torch.tensor([0, 5])}, ValueError, "cu_seqlens must end at T=6, got 5"),
    "loss_shape": (
        generic, {"loss_fn": lambda lp, h, r: (lp, lp)}, ValueError, r"loss_fn must return.*0-dim loss, got shape \[6\]"
    ),
    "loss_type_of": (generic, {"loss_fn": lambda lp, h, r: (1.0, lp)}, ValueError, "loss_fn must return.*got float"),
    "weight_dim": (ppo, {"weight": torch.zeros(5, 7)}, ValueError, "hidden must have weight's D=7"),
    "old_shape": (ppo, {"old_logprobs": torch.zeros(5)}, ValueError, r"old_logprobs must have targets's shape \[6\]"),
    "advantages_integer": (ppo, {"advantages": torch.zeros(6).long()}, TypeError, "advantages must be one of float16"),
    "sequences": (ppo, {"loss_type": "gspo"}, ValueError, "cu_seqlens must be given, or targets as.*loss_type"),
    "no_entropy": (ppo, {"ent_coef": 0.1, "with_entropy": False}, ValueError, "with_entropy must be True"),
    "kl_needs": (ppo, {"kl_coef": 0.1}, ValueError, "ref_logprobs must be given with kl_coef=0.1, got None"),
    "nll_needs": (ppo, {"nll_coef": 0.1}, ValueError, "nll_mask must be given with nll_coef=0.1, got None"),
    "loss_type": (ppo, {"loss_type": "trpo"}, ValueError, "loss_type must be one of.*got 'trpo'"),
    "num_tokens": (ppo, {"num_tokens": -1}, ValueError, "num_tokens must be a finite number >= 0, got -1"),
    "norm": (ppo, {"aggregation": "token_sum_norm", "num_seqs": 2}, ValueError, "norm goes with aggregation"),
}  # fmt: skip


@pytest.mark.parametrize("call, change, error, message", ERRORS.values(), ids=ERRORS)
def test_errors(call, change, error, message):
    with pytest.raises(error, match=message):
        call(**change)


# -- properties -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10**6),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
    st.integers(1, 30),
    st.sampled_from(["ppo", "reinforce", "cispo", "gspo", "gmpo", "sapo"]),
    st.sampled_from(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]),
    st.sampled_from(["auto", "off"]),
)
@pytest.mark.filterwarnings("ignore:a sequence is longer")
def test_any_chunks_equal_the_composition(seed, lengths, chunk_tokens, loss_type, aggregation, compact):
    head, x = make_head(sum(lengths), 11, seed=seed, ignored=0.1), make_loss_inputs(lengths, seed=seed)
    options = {"loss_type": loss_type, "aggregation": aggregation, "ent_coef": 0.05}
    got = run_ppo(linear_ppo_loss, head, x, chunk_tokens=chunk_tokens, compact=compact, **options)
    truth = run_ppo(plain_ppo_loss, head, x, double=True, **options)
    for name, a, b in zip(NAMES, got, truth, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("logits_dtype", [None, torch.float32], ids=str)
@pytest.mark.parametrize("coefficient", [1e-4, 1e-6, 1e-8])
def test_float16_keeps_what_a_loss_scale_lifts(coefficient, logits_dtype):
    """A loss of 1e-8 a token times a scale of 65536: the gradients are those of the scaled loss, not zeros."""
    head = make_head(12, 40, dtype=torch.float16)
    scale = 65536.0

    def total(logprobs, entropy, rows):
        return coefficient * logprobs.sum(), logprobs.sum()[None]

    def gradients(dtype, loss_of):
        leaves = [x.to(dtype).requires_grad_() for x in head[:2]]
        return torch.autograd.grad(loss_of(*leaves) * scale, leaves)

    got = gradients(torch.float16, lambda h, w: linear_loss(h, w, head.targets, total, logits_dtype=logits_dtype).loss)
    right = gradients(
        torch.float64, lambda h, w: linear_logprob(h, w, head.targets, backend="torch").logprobs.sum() * coefficient
    )
    for a, b in zip(got, right, strict=True):
        # float16's rounding of every number on the way; its smallest is 6e-8.
        assert (a.double() - b).abs().max() <= 4e-3 * b.abs().max() + 6e-8


def test_loss_fn_must_return_metrics_of_one_shape():
    head = make_head(6, 9)
    for metrics, error, message in (
        (lambda n: None, TypeError, "loss_fn must return .* metrics a torch.Tensor, got NoneType"),
        (lambda n: torch.zeros(n), ValueError, r"metrics of one shape for every chunk, \[4\], got \[2\]"),
    ):
        with pytest.raises(error, match=message):
            linear_loss(*head[:2], head.targets, lambda lp, h, rows, m=metrics: (lp.sum(), m(len(lp))), chunk_tokens=4)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_what_a_masked_position_holds_is_not_looked_at(backend):
    """A target of no token and a temperature of NaN, under a mask of 0."""
    head, mask = make_head(4, 9), torch.tensor([1, 1, 0, 1])
    targets, temperature = head.targets.clone(), torch.tensor([1.0, 0.5, math.nan, 2.0])
    targets[2] = -1

    def total(logprobs, entropy, rows):
        return logprobs.sum(), logprobs.sum()[None]

    got = linear_loss(*head[:2], targets, total, mask=mask, temperature=temperature, backend=backend)
    kept = mask != 0
    right = linear_logprob(head.hidden[kept], head.weight, head.targets[kept], temperature=temperature[kept]).logprobs
    torch.testing.assert_close(got.logprobs[kept], right)
    assert got.logprobs[2] == 0
    torch.testing.assert_close(got.loss, right.sum())
    out = linear_ppo_loss(*head[:2], targets, None, torch.ones(4), mask=mask, temperature=temperature, backend=backend)
    assert bool(out.loss.isfinite()) and out.metrics[0] == 3


def test_unsigned_targets_have_no_ignored_id():
    """156 as uint8 is -100 to a comparison that does not widen first."""
    head = make_head(4, 200)
    targets = torch.tensor([156, 2, 1, 3], dtype=torch.uint8)
    right = linear_logprob(*head[:2], targets.long()).logprobs
    for backend in ("auto", "torch"):
        out = linear_ppo_loss(*head[:2], targets, None, torch.ones(4), backend=backend)
        torch.testing.assert_close(out.logprobs, right)
        assert out.metrics[0] == 4


@pytest.mark.parametrize("derived", [False, True], ids=["leaf", "computed"])
def test_what_else_the_loss_depends_on_is_not_forgotten(derived):
    """A trained temperature, say: its gradient would be taken by nobody."""
    head, x = problem()
    scale = torch.ones(3, requires_grad=True)

    def loss_fn(logprobs, entropy, rows):
        other = (scale * 2).sum() if derived else scale[0]
        return (logprobs * other).sum(), logprobs.new_zeros(1, dtype=torch.float64)

    leaf = head.hidden.clone().requires_grad_()
    with pytest.raises(
        ValueError, match=r"loss_fn must be differentiable in logprobs and entropy alone, .* shape \[3\]"
    ):
        linear_loss(leaf, head.weight, head.targets, loss_fn)
    with torch.no_grad():
        linear_loss(leaf, head.weight, head.targets, loss_fn)
