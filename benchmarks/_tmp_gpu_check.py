import copy, pickle, sys, time, warnings
import torch
import equilibria as eq
from equilibria import nn as enn
from equilibria.problems import *
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".*torch.jit.*")
print(torch.__version__, torch.cuda.get_device_name())
torch.manual_seed(0)
P=Patches(channels=4,size=2)
cases={
 "geq vec":(lambda:enn.GEQ(6,8),torch.randn(4,6)),
 "geq conv":(lambda:enn.GEQ(8,8,patch=P),torch.randn(4,8,8,8)),
 "geq learned":(lambda:enn.GEQ(8,8,patch=P,gamma=LearnedGamma(.3)),torch.randn(4,8,8,8)),
 "kerdeq":(lambda:enn.KerDEQ(8,8),torch.randn(4,8,8,8)),
 "opteq":(lambda:enn.OptEq(6,8),torch.randn(4,6)),
 "opteq hid conv":(lambda:enn.OptEq(6,8,kernel_size=3,form="hidden"),torch.randn(4,6,8,8)),
 "poly":(lambda:enn.PolynomialEq(6,8,radius=.2),torch.randn(4,6)),
 "sigmoid":(lambda:enn.SigmoidEq(6,8,kernel_size=3),torch.randn(4,6,4,4)),
}
torch.backends.cuda.matmul.allow_tf32=False; torch.backends.cudnn.allow_tf32=False
for name,(f,x) in cases.items():
    L=f().eval(); G=copy.deepcopy(L).cuda()
    a=L(x).detach(); z=G(x.cuda()); d=(z.detach().cpu()-a).abs().max().item()
    z.square().sum().backward(); ok=all(p.grad is not None and p.grad.is_cuda and p.grad.isfinite().all() for p in G.parameters())
    with torch.device("cuda"): D=f()
    D.load_state_dict(L.state_dict()); D.eval(); d2=(D(x.cuda())-z).abs().max().item()
    T=pickle.loads(pickle.dumps(G)); d3=(T(x.cuda())-z).abs().max().item()
    with torch.autocast("cuda",dtype=torch.bfloat16):
        h=G.train()(x.cuda()); 
    h.float().sum().backward()
    d4=(h.float().cpu()-a).abs().max().item()
    cl=True
    if x.ndim==4:
        y=G.eval()(x.cuda().to(memory_format=torch.channels_last)); cl=y.is_contiguous(memory_format=torch.channels_last) and not y.is_contiguous()
    print(f"{name:15s} cpu-gpu {d:.1e} ondevice {d2:.1e} pickle {d3:.1e} bf16 {d4:.1e} {h.dtype} grads {ok} channels_last {cl}",flush=True)
# time of a training step and of the constraint
L=enn.GEQ(128,256,patch=Patches(channels=8,size=2),solver=eq.Picard(rtol=0.,atol=0.,max_steps=4),adjoint=eq.Phantom(steps=3)).cuda().to(memory_format=torch.channels_last)
x=torch.randn(256,128,16,16,device="cuda").to(memory_format=torch.channels_last)
def step(m):
    with torch.autocast("cuda",dtype=torch.bfloat16): z=m(x)
    z.float().square().mean().backward()
def timed(f,n=10):
    for _ in range(3): f()
    torch.cuda.synchronize(); t=time.time()
    for _ in range(n): f()
    torch.cuda.synchronize(); return (time.time()-t)/n*1e3
print("eager train step ms",timed(lambda:step(L)))
print("constraint alone ms",timed(lambda:L.W.weight), "eval", timed(lambda:L.eval().W.weight)); L.train()
C=torch.compile(L,fullgraph=True)
t=time.time(); step(C); torch.cuda.synchronize(); print("compile s",time.time()-t)
print("compiled train step ms",timed(lambda:step(C)))
A=enn.GEQ(128,256,patch=Patches(channels=8,size=2)).cuda()
print("Auto+Implicit step ms",timed(lambda:step(A),3))
