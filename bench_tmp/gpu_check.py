import os,sys,time,torch
sys.path.insert(0,os.getcwd())
import transformers as t
from verifiers.engine.engine import Engine
from verifiers.engine.requests import Sampling
def cfg135(): return t.LlamaConfig(vocab_size=49152,hidden_size=576,intermediate_size=1536,num_hidden_layers=30,num_attention_heads=9,num_key_value_heads=3,max_position_embeddings=8192,rms_norm_eps=1e-5,tie_word_embeddings=True,rope_parameters={"rope_type":"default","rope_theta":100000.0},bos_token_id=1,eos_token_id=2,pad_token_id=2)
torch.manual_seed(0)
small=dict(vocab_size=300,hidden_size=64,intermediate_size=128,num_hidden_layers=3,num_attention_heads=4,num_key_value_heads=2,max_position_embeddings=256,pad_token_id=0,bos_token_id=1,eos_token_id=2)
fams={'llama':(t.LlamaForCausalLM,t.LlamaConfig(**small)),'qwen3':(t.Qwen3ForCausalLM,t.Qwen3Config(**small,head_dim=32)),'gemma2':(t.Gemma2ForCausalLM,t.Gemma2Config(**small,head_dim=16,sliding_window=24)),'mistral':(t.MistralForCausalLM,t.MistralConfig(**small,sliding_window=24)),'gpt2':(t.GPT2LMHeadModel,t.GPT2Config(vocab_size=300,n_embd=64,n_layer=3,n_head=4,n_positions=256,bos_token_id=1,eos_token_id=2))}
def check(m,outs,T):
    bad=[]
    with torch.no_grad():
        for o in outs:
            full=torch.tensor([o.prompt_ids+o.ids]).cuda(); lg=m(full).logits[0,len(o.prompt_ids)-1:-1]
            ref=torch.log_softmax(lg.float()/T,-1).gather(1,torch.tensor(o.ids).cuda()[:,None])[:,0].cpu()
            bad.append((ref-torch.tensor(o.logprobs)).abs())
    b=torch.cat(bad); return b.mean().item(), b.max().item()
m=t.LlamaForCausalLM(cfg135()).eval().cuda().to(torch.bfloat16)
with torch.no_grad():
    for p in m.parameters(): p.mul_(1.0)
import random
random.seed(0)
def bench(R,N,mixed):
    e=Engine(m,rows=R,length=512,prefill_tokens=32768)
    samp=[Sampling(max_tokens=random.randint(64,256) if mixed else 160,temperature=1.0,seed=i) for i in range(N)]
    for _ in range(3):
        prompts=[[random.randrange(3,49000) for _ in range(random.randint(32,96))] for _ in range(N)]
        torch.cuda.synchronize(); t0=time.perf_counter(); s0=e.steps
        fs=[f for p,s in zip(prompts,samp) for f in e.submit(p,s)]
        n=sum(len(f.result().ids) for f in fs)
        dt=time.perf_counter()-t0; print(f"rows {R} requests {N} mixed {mixed}: {n/dt:,.0f} tok/s  steps {e.steps-s0} {dt/(e.steps-s0)*1000:.2f} ms/step",flush=True)
    e.close(); del e; torch.cuda.empty_cache()
for R,N in ((256,256),(1024,1024),(1024,4096)): bench(R,N,True)
