import os,sys,torch,triton
sys.path.insert(0,os.getcwd())
from verifiers.engine import kernels as K
torch.manual_seed(0)
B,H,G,D,L=1024,9,3,64,513
q=torch.randn(B,H,1,D,device='cuda',dtype=torch.bfloat16); k=torch.randn(B,G,1,D,device='cuda',dtype=torch.bfloat16); v=torch.randn_like(k)
store=torch.randn(6,2,B,G,L,D,device='cuda',dtype=torch.bfloat16)
length=torch.randint(60,320,(B,),device='cuda')
print("mean len",length.float().mean().item(),"ideal us",B*length.float().mean().item()*G*D*4/4.0e12*1e6)
ref=None
for bs,w,st in ((64,4,3),):
    K.BLOCK_S,K.WARPS,K.STAGES=bs,w,st
    i=[0]
    def f():
        i[0]=(i[0]+1)%6
        return K.attend(q,k,v,store[i[0],0],store[i[0],1],length,scale=D**-.5,window=None,softcap=None)
    try: print(bs,w,st, round(triton.testing.do_bench(f,warmup=50,rep=200)*1000,1),"us",flush=True)
    except Exception as e: print(bs,w,st,"ERR",repr(e)[:100])
lg=torch.randn(B,49152,device='cuda',dtype=torch.bfloat16)*3
T=torch.ones(B,device='cuda'); s=torch.arange(B,device='cuda'); z=torch.zeros(B,dtype=torch.int64,device='cuda')
for bv,w in ((2048,4),(4096,8),(4096,4)):
    K.BLOCK_V=bv
    import inspect
    def g():
        token=torch.empty(B,dtype=torch.int64,device='cuda'); lp=torch.empty(B,device='cuda'); raw=torch.empty(B,device='cuda')
        K._sample[(B,)](lg,T,s,z,token,lp,raw,lg.stride(0),V=49152,BLOCK=bv,num_warps=w); return token,lp,raw
    print("sample",bv,w,round(triton.testing.do_bench(g,warmup=50,rep=200)*1000,1),"us",flush=True)
# distribution test
V=1000; N=200000
one=torch.randn(1,V,device='cuda')*2
tok=[]
for step in range(4):
    t,lp,raw=K.sample(one.expand(50000,V).contiguous(),torch.ones(50000,device='cuda'),torch.arange(50000,device='cuda')+7,torch.full((50000,),step,device='cuda'))
    tok.append(t)
tok=torch.cat(tok); f=torch.bincount(tok,minlength=V).float()/len(tok); p=torch.softmax(one[0],-1)
chi=((f-p)**2/p).sum()*len(tok); print("chi2/df", (chi/(V-1)).item(), "lp err",(lp-torch.log_softmax(one[0],-1)[t]).abs().max().item())
# seeds consecutive correlation
a=tok[:50000]; print("adjacent equal rate",(a[1:]==a[:-1]).float().mean().item(),"expected",(p*p).sum().item())
