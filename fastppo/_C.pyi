"""The compiled module; csrc/bindings.cpp."""

csrc_hash: str
cuda_archs: str

# Address, row stride, time stride (in elements), dtype code of csrc/common/dtype.h.
_Strided = tuple[int, int, int, int]

def cpu_isa() -> str: ...
def cuda_problem(device: int) -> str: ...
def gae(
    rewards: _Strided,
    values: _Strided,
    mask: _Strided | None,
    terminated: _Strided | None,
    truncated: _Strided | None,
    bootstrap_values: _Strided | None,
    final_values: _Strided | None,
    lam_per_seq: int,
    lam_returns_per_seq: int,
    cu_seqlens: int,
    cu_seqlens_int64: bool,
    advantages: int,
    returns: int,
    out_row_stride: int,
    out_time_stride: int,
    num_seqs: int,
    num_steps: int,
    gamma: float,
    lam: float,
    lam_returns: float,
    separate_returns: bool,
    num_threads: int,
    device: int,
    stream: int,
) -> None: ...

# Address, rows per outer step, outer stride, inner stride (in elements).
_Rows = tuple[int, int, int, int]

def logprob_stats(
    logits: _Rows,
    dtype: int,
    targets: int,
    temperature: int,
    scalar_temperature: float,
    softcap: float,
    ignore_index: int,
    with_entropy: bool,
    num_rows: int,
    width: int,
    start: int,
    used: int,
    stats: int,
    num_threads: int,
) -> None: ...
def logprob_combine(
    gathered: int,
    num_ranks: int,
    num_rows: int,
    targets: int,
    temperature: int,
    scalar_temperature: float,
    ignore_index: int,
    logprobs: int,
    entropy: int,
    row: int,
) -> None: ...
def logprob_dlogits(
    logits: _Rows,
    dtype: int,
    targets: int,
    temperature: int,
    scalar_temperature: float,
    softcap: float,
    ignore_index: int,
    with_entropy: bool,
    num_rows: int,
    width: int,
    start: int,
    used: int,
    dlogits: _Rows,
    row: int,
    grad_logprobs: int,
    grad_logprobs_stride: int,
    grad_entropy: int,
    grad_entropy_stride: int,
    num_threads: int,
) -> None: ...
def moments(x: int, mask: int, size: int, moments: int, num_threads: int) -> None: ...
def whiten(x: int, mask: int, size: int, moments: int, out: int, eps: float, num_threads: int) -> None: ...
def ppo_loss(
    rows: int,
    cols: int,
    logprobs: _Strided,
    old_logprobs: _Strided | None,
    advantages: _Strided,
    mask: _Strided | None,
    entropy: _Strided | None,
    ref_logprobs: _Strided | None,
    rollout_logprobs: _Strided | None,
    nll_mask: _Strided | None,
    cu_seqlens: tuple[int, bool, int] | None,
    rows_are_sequences: bool,
    loss_type: int,
    kl_type: int,
    kl_pathwise: bool,
    correction: int,
    aggregation: int,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
    sapo_tau: float,
    sapo_tau_other: float,
    ent_coef: float,
    kl_coef: float,
    is_low: float,
    is_high: float,
    nll_coef: float,
    norm: float,
    num_tokens: float,
    num_seqs: float,
    num_nll_tokens: float,
    grad: int,
    entropy_grad: int,
    nll_grad: int,
    loss: int,
    scale: int,
    nll_scale: int,
    metrics: int,
    num_threads: int,
) -> None: ...
def value_loss(
    rows: int,
    cols: int,
    values: _Strided,
    old_values: _Strided | None,
    returns: _Strided,
    mask: _Strided | None,
    cu_seqlens: tuple[int, bool, int] | None,
    rows_are_sequences: bool,
    aggregation: int,
    clip_eps: float,
    norm: float,
    num_tokens: float,
    num_seqs: float,
    grad: int,
    loss: int,
    scale: int,
    metrics: int,
    num_threads: int,
) -> None: ...
def loss_grad(
    kept: int, nll_kept: int, factor: int, nll_factor: int, grad: int, dtype: int, tokens: int, num_threads: int
) -> None: ...
