from types import SimpleNamespace as N
from firm.report.ledger import ledger_table
from firm.report.tables import Setting
class R(N): pass
def rec(n): 
    return N(rows=[{"kind":"round","round":i+1,"bytes_up":1000} for i in range(n)], rounds=[{"kind":"round","round":i+1,"bytes_up":1000,"clients":["a"]} for i in range(n)], last_round=n, objectives=("a","b"), header={}, settings={}, seed=n)
s=Setting.of("s",0,[rec(1),rec(2)])
t=ledger_table([s]); print(t.headings if hasattr(t,'headings') else t, t.rows)
import numpy as np, firm.fmoo.workspace
from firm.report.settings_tables import summary_table, final_table
from firm.report.criteria import criteria_of
def run(v): 
    return [dict(kind="evaluation",round=r,split="test",accuracies={"a":x,"b":x}) for r,x in ((0,.1),(5,v))]
A=Setting("A",0,[run(.5),run(None),run(.9)]); c=criteria_of([A])[0]
print(summary_table([A],c,{},has_spread=True)); print(final_table([A],c,{}).rows)
# parameter section: unfinished counted as diverged
from firm.report.settings_sections import parameter_section
B=Setting("B",1,[run(.6)])
from dataclasses import dataclass
W=Setting("W",2,[run(.6)[:1]],records=[N(num_rounds=5,objectives=("a","b"),seed=0,settings={},method={},learns_from_pairs=False)])
try:
    sec=parameter_section("strategy.beta",{"f":{0.1:A,0.2:B,0.3:Setting("C",3,[run(.7)]),0.4:W}},[c]); print(sec.text)
    sec=parameter_section("strategy.beta",{"f":{0.2:B,0.3:Setting("C",3,[run(.7)]),0.4:W}},[c]); print("no divergence:",sec.text)
except Exception as e: print(repr(e))
# improved with unserved objectives
import torch
from torch import nn
from torch.utils.data import TensorDataset
from firm.fmoo import LocalConfig, SupervisedClient, TaskData, Workspace, MultiTaskModel
from firm.fmoo.measures import share_improved
from firm.federation.server import ServerState
torch.manual_seed(0)
x=torch.randn(40,6); y=torch.stack([x[:,0],x[:,1]],-1)
data=TaskData.of_clients({"n":TensorDataset(x,y)},losses={"p":"squared","q":"squared"})
net=MultiTaskModel(nn.Flatten(),[nn.Linear(6,1),nn.Linear(6,1)])
w=Workspace(net,data,LocalConfig(lr=.05,batch_size=8)); sh=data.indices_by_client()
cl=SupervisedClient("n",w,sh["n"],seed=0,served=[0])
before=cl.adapter() if True else None
k=list(before); after={n:v.clone() for n,v in before.items()}
w.load(before); l0=w.evaluate(data).losses
# head 0 moves towards target, head 1 (unserved by the client) away
for n in k:
    if n.endswith("0.weight"): after[n]=after[n]*0; after[n][0,0]=1
    if n.endswith("1.weight"): after[n]=after[n]+3
w.load(after); l1=w.evaluate(data).losses
print(k,l0,l1)
f=N(workspace=w,shards=sh)
print("improved", share_improved(f,N(adapter=before),N(adapter=after),{"clients":["n"]}))
