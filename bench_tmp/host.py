import os,sys,time,torch,random,cProfile,pstats,io
sys.path.insert(0,os.getcwd()); sys.path.insert(0,'benchmarks')
import engine as B
from verifiers.engine.engine import Engine
from verifiers.engine.requests import Sampling
random.seed(0)
m=B.make(B.SMOLLM2,"cuda")
waits=[0.0]
from verifiers.engine import cuda as C
def run(R,N,prof,rounds=3):
    e=Engine(m,rows=R,length=512,prefill_tokens=32768)
    limits=[random.randint(64,256) for _ in range(N)]
    if prof:
        orig=e._loop
        pr=cProfile.Profile()
        def loop():
            pr.enable(); orig(); pr.disable()
        e._loop=loop
    for _ in range(rounds):
        ps=B.prompts_of(N,32,96,49152)
        pf=[0.0]; op=type(e)._prefill
        def timed_prefill(groups,pf=pf):
            torch.cuda.synchronize(); t=time.perf_counter(); op(e,groups); torch.cuda.synchronize(); pf[0]+=time.perf_counter()-t
        e._prefill=timed_prefill
        s0=e.steps; t=time.perf_counter(); n=B.by_engine(e,ps,limits); dt=time.perf_counter()-t
        print(f"R{R} N{N}: {n/dt:,.0f} tok/s, {dt:.3f}s, steps {e.steps-s0}, prefill {pf[0]:.3f}s, rest/step {(dt-pf[0])/(e.steps-s0)*1000:.2f} ms",flush=True)
    # pure gpu replay time per bucket
    for size in (1024,512,256,128,32,1):
        if size>R: continue
        g,_=e._cuda._graph(size,False)
        e._cuda.length.fill_(200)
        torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(20): g.replay(); e._cuda.length.fill_(200)
        torch.cuda.synchronize(); print("bucket",size,"replay ms",(time.perf_counter()-t)/20*1000,flush=True)
    e._cuda.length.fill_(512)
    e.close()
    if prof:
        s=io.StringIO(); pstats.Stats(pr,stream=s).sort_stats('tottime').print_stats(22); print(s.getvalue()[:5200],flush=True)
run(1024,1024,False,4)
run(1024,4096,False,2)
run(1024,1024,True,3)
