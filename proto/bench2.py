import sys, time, statistics
sys.path.insert(0, "benchmarks"); sys.path.insert(0, "proto")
import torch, triton
import fastppo
from fastppo.kernels import tiles
dev = torch.device("cuda"); torch.manual_seed(0)
print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)
def inputs(n, dt=torch.float32):
    old = -3 * torch.rand(n, device=dev)
    f = lambda x: x.to(dt)
    return dict(l=f((old + .2 * torch.randn(n, device=dev)).clamp_max(0)).requires_grad_(), e=f(2 * torch.rand(n, device=dev)).requires_grad_(), old=f(old), ref=f((old + .2 * torch.randn(n, device=dev)).clamp_max(0)), adv=f(torch.randn(n, device=dev)), mask=torch.rand(n, device=dev) < .75)
def graph_us(calls, reps=9):
    for c in calls[:2]: c()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for c in calls: c()
    g.replay(); torch.cuda.synchronize()
    ts = []
    for _ in range(reps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); b.synchronize()
        ts.append(a.elapsed_time(b) * 1e3 / len(calls))
    del g
    return statistics.median(ts)
def ours(i, ent=True, **kw):
    return fastppo.ppo_loss(i["l"], i["old"], i["adv"], mask=i["mask"], clip_eps=.2, entropy=i["e"] if ent else None, ent_coef=.01 if ent else 0.0, ref_logprobs=i["ref"], kl_coef=.1, kl_grad="pathwise", **kw).loss
def fb(i, ent=True, **kw):
    return torch.autograd.grad(ours(i, ent, **kw), [i["l"], i["e"]] if ent else [i["l"]])
def host_us(f, k=200, reps=5):
    for _ in range(20): f()
    torch.cuda.synchronize(); out = []
    for _ in range(reps):
        t = time.perf_counter()
        for _ in range(k): f()
        out.append((time.perf_counter() - t) / k * 1e6); torch.cuda.synchronize()
    return min(out)
N = 4194304; n = 65536
small = [inputs(n) for _ in range(30)]
i = small[0]
def wall():
    fb(i, num_tokens=50000.0); torch.cuda.synchronize()
print(f"host us 65536: fwd+bwd queued {host_us(lambda: fb(i, num_tokens=50000.0)):.1f}, fwd {host_us(lambda: ours(i, num_tokens=50000.0)):.1f}, wall with synchronise {host_us(wall):.1f}")
with torch.no_grad(): print(f"  no_grad fwd {host_us(lambda: ours(i, num_tokens=50000.0)):.1f}")
import cProfile, pstats
p = cProfile.Profile(); p.enable()
for _ in range(1000): fb(i, num_tokens=50000.0)
p.disable(); torch.cuda.synchronize(); pstats.Stats(p).sort_stats("tottime").print_stats(22)
x = torch.empty(1 << 27, device=dev); y = torch.empty_like(x)
bw = 2 * x.numel() * 4 / graph_us([lambda: y.copy_(x)] * 3) / 1e3; del x, y
print(f"copy {bw:.0f} GB/s")
T = tiles.TokenTiles
def config(g, w, p, rows=None, fw=None):
    tiles.LOSS_TOKENS = T(g, 4, w, p)
    if rows: tiles.LOSS_FINISH_ROWS, tiles.LOSS_FINISH_WARPS = rows, fw
print("65536: fwd, fwd+bwd us by G, warps, finish rows, warps")
for g, w in ((64, 2), (64, 4), (128, 4), (256, 4), (256, 8)):
    for rows, fw in ((64, 4), (64, 8), (128, 8), (256, 16)):
        config(g, w, 1056, rows, fw)
        print(f"  {g, w, rows, fw}: {graph_us([lambda i=i: ours(i, num_tokens=50000.0) for i in small]):.2f} {graph_us([lambda i=i: fb(i, num_tokens=50000.0) for i in small]):.2f}", flush=True)
del small
big = [inputs(N) for _ in range(3)]
for ent in (False, True):
    print(f"4194304, entropy {ent}: fwd us by G, warps, programs, finish rows, warps")
    rows = []
    for g, w in ((128, 4), (256, 4), (256, 8), (512, 8)):
        for P in (264, 396, 528, 1056, 2112):
            config(g, w, P, 256, 16)
            rows.append((graph_us([lambda i=i: ours(i, ent) for i in big], 7), g, w, P))
    rows.sort()
    for r in rows[:8] + rows[-2:]: print("  ", r)
    _, g, w, P = rows[0]
    config(g, w, P, 256, 16)
    for t, gw in ((1024, 4), (2048, 4), (2048, 8), (4096, 8)):
        tiles.LOSS_GRAD_TOKENS, tiles.LOSS_GRAD_WARPS = t, gw
        print(f"   fwd+bwd {graph_us([lambda i=i: fb(i, ent) for i in big]):.2f} grad tile {t, gw}", flush=True)
config(256, 4, 528, 256, 16)
print("other cases, fwd+bwd us")
b = big[0]
cu = torch.arange(0, N + 1, 1024, device=dev, dtype=torch.int32); one = torch.tensor([0, 131072], device=dev)
part = {k: v.detach()[:131072].requires_grad_(k in "le") for k, v in b.items()}
rows2 = {k: v.detach().view(2048, 2048).requires_grad_(k in "le") for k, v in b.items()}
strided = {k: (torch.nn.functional.pad(v.detach().view(2048, 2048), (1, 0))[:, 1:]).requires_grad_(k in "le") for k, v in b.items()}
half = inputs(N, torch.bfloat16); odd = {k: v.detach()[:N - 3].requires_grad_(k in "le") for k, v in b.items()}
for name, i, kw in (("ppo cu_seqlens 4096x1024", b, dict(cu_seqlens=cu)), ("seq_mean_token_mean cu", b, dict(cu_seqlens=cu, aggregation="seq_mean_token_mean")), ("gspo cu 4096x1024", b, dict(cu_seqlens=cu, loss_type="gspo")), ("gspo 1x131072", part, dict(cu_seqlens=one, loss_type="gspo")), ("ppo flat 131072", part, {}),
    ("ppo rows 2048x2048", rows2, {}), ("gspo rows", rows2, dict(loss_type="gspo")), ("ppo strided rows", strided, {}), ("bf16 flat", half, {}), ("odd length", odd, {}), ("seq_mask_tis cu", b, dict(cu_seqlens=cu, is_correction="seq_mask_tis", rollout_logprobs=b["ref"]))):
    print(f"  {name}: fwd {graph_us([lambda: ours(i, **kw)] * 3):.1f} fwd+bwd {graph_us([lambda: fb(i, **kw)] * 3):.1f}", flush=True)
v = big[1]
val = lambda: fastppo.value_loss(v["l"], v["old"], v["ref"], mask=v["mask"], clip_eps=.2).loss
print(f"  value_loss 4M fwd {graph_us([val] * 3):.1f} fwd+bwd {graph_us([lambda: torch.autograd.grad(val(), v['l'])] * 3):.1f}")
