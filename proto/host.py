import os, sys, time, cProfile, pstats
import torch
torch.set_num_threads(1)
from fastppo.kernels import launch
import fastppo.kernels.ppo_loss, fastppo.kernels.loss_grad
os.environ["TRITON_INTERPRET"] = "1"
class K: 
    function = 1; packed_metadata = 2
    def run(self, *a): pass
k = K()
def call(self, programs, tensors, numbers, constants, warps):
    index = tensors[0].device.index
    torch._C._get_tracing_state()
    addresses = [0 if x is None else x.data_ptr() for x in tensors]
    together = 0
    for a in addresses: together |= a
    key = (index, warps, constants, *[None if x is None else x.dtype for x in tensors])
    self.compiled.get(key)
    k.run(programs, 1, 1, 0, k.function, k.packed_metadata, None, None, None, *addresses, *numbers, *constants)
launch.Launcher.__call__ = call
import fastppo
n = 65536
torch.manual_seed(0)
l = torch.randn(n).requires_grad_(); e = torch.randn(n).requires_grad_(); old, ref, adv = torch.randn(3, n); m = torch.rand(n) < .5
import fastppo.backends as B
def f():
    loss = fastppo.ppo_loss(l, old, adv, mask=m, clip_eps=.2, entropy=e, ent_coef=.01, ref_logprobs=ref, kl_coef=.1, kl_grad="pathwise", num_tokens=5000, backend="triton").loss
    return torch.autograd.grad(loss, [l, e])
B.KERNELS["loss_grad"]["cpu"] = ("triton",)
def fwd_only():
    return fastppo.ppo_loss(l, old, adv, mask=m, clip_eps=.2, entropy=e, ent_coef=.01, ref_logprobs=ref, kl_coef=.1, kl_grad="pathwise", num_tokens=5000, backend="triton").loss
def us(f, k=2000):
    for _ in range(50): f()
    best = 1e9
    for _ in range(5):
        t = time.perf_counter()
        for _ in range(k // 5): f()
        best = min(best, (time.perf_counter() - t) / (k // 5) * 1e6)
    return best
print("fwd+bwd", us(f), "fwd", us(fwd_only))
with torch.no_grad(): print("no_grad fwd", us(fwd_only))
if "prof" in sys.argv:
    p = cProfile.Profile(); p.enable()
    for _ in range(2000): f()
    p.disable()
    pstats.Stats(p).sort_stats("tottime").print_stats(28)
