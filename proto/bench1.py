import sys, time, statistics, itertools
sys.path.insert(0, "proto"); sys.path.insert(0, "benchmarks")
import torch, triton
import k1
torch.manual_seed(0)
dev = torch.device("cuda")
print(torch.cuda.get_device_name(), torch.__version__, triton.__version__)

def inputs(n, ent=True, mask=True):
    old = -3 * torch.rand(n, device=dev)
    logp = (old + 0.2 * torch.randn(n, device=dev)).clamp_max(0)
    ref = (old + 0.2 * torch.randn(n, device=dev)).clamp_max(0)
    return dict(logp=logp, old=old, adv=torch.randn(n, device=dev), mask=(torch.rand(n, device=dev) < .75) if mask else None, ref=ref, ent=2 * torch.rand(n, device=dev) if ent else None)

def graph_us(calls, reps=20):
    for c in calls[:2]: c()
    torch.cuda.synchronize()
    s = torch.cuda.Stream()
    with torch.cuda.stream(s):
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
    return statistics.median(ts)

def outs(n, P, ent):
    return dict(grad=torch.empty(n, device=dev), eg=torch.empty(n, device=dev) if ent else None, part=torch.empty(P, 16, device=dev, dtype=torch.float64), small=torch.empty(2, device=dev), metrics=torch.empty(14, device=dev, dtype=torch.float64))

def fwd(i, o, n, P, R, warps, f64=False, stages=1, V=4, finish=True, PB=128, fw=8):
    P = min(P, triton.cdiv(n, R * V))
    k1.tokens_kernel[(P,)](i["logp"], i["old"], i["adv"], i["mask"], i["ref"], i["ent"], o["grad"], o["eg"], o["part"], n // 16, 0.8, 1.2, 0.1, 0.01,
        REST=n % 16, R=R, V=V, F64=f64, LOOPED=True, STAGES=stages, PATHWISE=True, num_warps=warps)
    if finish:
        k1.finish_kernel[(1,)](o["part"], o["small"], o["metrics"], P, -1.0, 0.1, 0.01, PB=PB, num_warps=fw)

def bwd(i, o, n, up, g, eg, BLOCK, warps):
    k1.grad_kernel[(triton.cdiv(n, BLOCK),)](o["grad"], o["eg"], up, o["small"][1:], g, eg, n // 16, REST=n % 16, BLOCK=BLOCK, num_warps=warps)

# correctness
from fastppo.reference.ppo_loss import ppo_loss as ref_loss
def check(n, **kw):
    i = inputs(n); o = outs(n, 4096, True)
    fwd(i, o, n, 4096, 256, 4, **kw)
    l = i["logp"].double().requires_grad_(); e = i["ent"].double().requires_grad_()
    loss, m = ref_loss(l, i["old"].double(), i["adv"].double(), mask=i["mask"], clip_eps=.2, entropy=e, ent_coef=.01, ref_logprobs=i["ref"].double(), kl_coef=.1, kl_grad="pathwise")
    gl, ge = torch.autograd.grad(loss, [l, e])
    print("check", n, kw, "loss err", abs(float(o["small"][0]) - float(loss)), "grad err", float((o["grad"] * o["small"][1] - gl).abs().max() / gl.abs().max()), "metrics rel", float(((o["metrics"] - m).abs() / (1 + m.abs())).max()))
check(100003); check(65536, f64=True)

N = 4194304
x = torch.empty(1 << 28, device=dev); y = torch.empty_like(x)
t = graph_us([lambda: y.copy_(x)] * 3); bw = 2 * x.numel() * 4 / t / 1e3; del x, y
print(f"copy {bw:.0f} GB/s")
sets = [inputs(N) for _ in range(3)]
for ent in (False, True):
    B = 29 if ent else 21
    for i in sets: i["_e"] = i["ent"] if "_e" not in i else i["_e"]
    ii = [dict(i, ent=i["_e"] if ent else None) for i in sets]
    oo = [outs(N, 8192, ent) for _ in sets]
    rows = []
    for P, R, warps, f64, st in [(p, r, w, f, s) for (r, w) in ((128, 2), (128, 4), (256, 4), (256, 8), (512, 4), (512, 8), (1024, 8)) for p in (264, 528, 1056, 2112, 8192) for f in (False, True) for s in (1,)] + [(p, r, w, False, s) for p in (264, 528, 1056) for r, w in ((256, 4), (512, 8)) for s in (2, 3)]:
        if ent and (f64 or st > 1): continue
        try:
            t = graph_us([lambda i=i, o=o: fwd(i, o, N, P, R, warps, f64, st, finish=False) for i, o in zip(ii, oo)], 9)
        except Exception as ex:
            t = float("nan"); print(type(ex).__name__, str(ex)[:80])
        rows.append((t, P, R, warps, f64, st))
    rows.sort()
    print(f"tokens kernel {N}, entropy {ent}, {B} B: us, GB/s, share of copy: best 14, worst 3")
    for t, *c in rows[:14] + rows[-3:]: print(f"  {t:7.2f} {B * N / t / 1e3:6.0f} {B * N / t / 1e3 / bw:5.2f}  P,R,warps,f64,stages {c}")
    best = rows[0][1:]
    for P in (264, 528, 1056, 2112):
        for PB, fw in ((32, 4), (64, 8), (128, 8), (256, 8), (256, 16)):
            t = graph_us([lambda o=o: k1.finish_kernel[(1,)](o["part"], o["small"], o["metrics"], P, -1.0, .1, .01, PB=PB, num_warps=fw) for o in oo] * 8, 9)
            if not ent: print(f"  finish P {P} PB {PB} warps {fw}: {t:.2f}")
    up = torch.ones((), device=dev); g = torch.empty(N, device=dev); eg = torch.empty(N, device=dev) if ent else None
    for BLOCK, w in ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (8192, 8)):
        f = lambda i, o: (fwd(i, o, N, *best), bwd(i, o, N, up, g, eg, BLOCK, w))
        tf = graph_us([lambda i=i, o=o: fwd(i, o, N, *best) for i, o in zip(ii, oo)], 9)
        tb = graph_us([lambda i=i, o=o: bwd(i, o, N, up, g, eg, BLOCK, w) for i, o in zip(ii, oo)], 9)
        t = graph_us([lambda i=i, o=o: f(i, o) for i, o in zip(ii, oo)], 9)
        print(f"  fwd {tf:.2f}  bwd alone {tb:.2f}  fwd+bwd {t:.2f}  BLOCK {BLOCK} warps {w}")
del sets, ii, oo, g, eg
n = 65536
ii = [inputs(n) for _ in range(30)]; oo = [outs(n, 4096, True) for _ in ii]; g = torch.empty(n, device=dev); eg = torch.empty(n, device=dev)
print("65536 tokens, entropy and KL: tokens / +finish / fwd+bwd us")
for R, w in ((64, 2), (64, 4), (128, 4), (256, 4), (256, 8)):
    for PB, fw in ((64, 4), (128, 8), (256, 16)):
        a = graph_us([lambda i=i, o=o: fwd(i, o, n, 4096, R, w, finish=False) for i, o in zip(ii, oo)], 9)
        b = graph_us([lambda i=i, o=o: fwd(i, o, n, 4096, R, w, PB=PB, fw=fw) for i, o in zip(ii, oo)], 9)
        c = graph_us([lambda i=i, o=o: (fwd(i, o, n, 4096, R, w, PB=PB, fw=fw), bwd(i, o, n, up, g, eg, 1024, 4)) for i, o in zip(ii, oo)], 9)
        print(f"  R {R} warps {w} PB {PB},{fw}: {a:.2f} {b:.2f} {c:.2f}")

# host costs
def host_us(f, k=300, reps=7):
    f(); torch.cuda.synchronize()
    out = []
    for _ in range(reps):
        t = time.perf_counter()
        for _ in range(k): f()
        out.append((time.perf_counter() - t) / k * 1e6); torch.cuda.synchronize()
    return min(out)
i, o = ii[0], oo[0]
print("host us: JIT fwd (2 launches)", host_us(lambda: fwd(i, o, n, 4096, 256, 4)))
print("host us: JIT finish", host_us(lambda: k1.finish_kernel[(1,)](o["part"], o["small"], o["metrics"], 64, -1.0, .1, .01, PB=64, num_warps=4)))
c = k1.tokens_kernel[(64,)](i["logp"], i["old"], i["adv"], i["mask"], i["ref"], i["ent"], o["grad"], o["eg"], o["part"], n // 16, 0.8, 1.2, 0.1, 0.01, REST=0, R=256, V=4, F64=False, LOOPED=True, STAGES=1, PATHWISE=True, num_warps=4)
ts = [i["logp"], i["old"], i["adv"], i["mask"], i["ref"], i["ent"], o["grad"], o["eg"], o["part"]]
consts = (0, 256, 4, False, True, 1, True)
def fast():
    stream = torch._C._cuda_getCurrentRawStream(0)
    c.run(64, 1, 1, stream, c.function, c.packed_metadata, None, None, None, *[t.data_ptr() for t in ts], n // 16, 0.8, 1.2, 0.1, 0.01, *consts)
before = o["grad"].clone(); o["grad"].zero_(); fast(); torch.cuda.synchronize(); print("fast launch same bits", torch.equal(before, o["grad"]))
print("host us: compiled.run with ints", host_us(fast))
def fast2():
    stream = torch._C._cuda_getCurrentRawStream(0)
    c.run(64, 1, 1, stream, c.function, c.packed_metadata, None, None, None, *ts, n // 16, 0.8, 1.2, 0.1, 0.01, *consts)
print("host us: compiled.run with tensors", host_us(fast2))
print("host us: torch.empty cuda", host_us(lambda: torch.empty(64, device=dev)), "empty_like", host_us(lambda: torch.empty_like(g)), "slice", host_us(lambda: g[3:7]), "0-dim select", host_us(lambda: g[3]), "as_strided", host_us(lambda: g.as_strided((), (), 3)), "split", host_us(lambda: g[:12].split([4, 4, 4])))
print("host us: torch.cuda.device ctx", host_us(lambda: torch.cuda.device(0).__enter__()), "current_device", host_us(torch.cuda.current_device))
import warnings; warnings.simplefilter("ignore")
import pytest
import bench_ppo_loss as bp
for n in (65536, N):
    iii = inputs(n); lv = [iii["logp"].requires_grad_(), iii["ent"].requires_grad_()]; rest = [iii["old"], iii["ref"], iii["adv"], iii["mask"]]
    for name, fn in (("eager", bp.ppo_in_torch), ("compile", torch.compile(bp.ppo_in_torch))):
        call = bp.forward_and_backward(fn, lv, rest)
        for _ in range(3): call()
        torch.cuda.synchronize()
        h = host_us(lambda: (call(), torch.cuda.synchronize()), 20, 3); hq = host_us(call, 20, 3)
        d = graph_us([call] * 3, 9) if name == "eager" or True else 0
        print(f"peer {name} {n}: wall {h:.0f} us, queued {hq:.0f}, device (graph) {d:.1f}")
