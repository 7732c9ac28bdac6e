import sys, time, importlib, traceback, warnings
import numpy as np, torch
torch.set_num_threads(1)
from . import core
warnings.simplefilter("ignore")
def main():
    fam, start, n = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    m = importlib.import_module("." + fam, __package__)
    t=time.time(); bad=0; kinds={}
    slow=[]
    for i in range(start, start+n):
        t1=time.time()
        try:
            d = m.draw(np.random.default_rng([sum(map(ord,fam)), i]))
            core.judge(d)
        except Exception as e:
            bad+=1
            msg=f"{type(e).__name__}: {str(e)[:300]}"
            if bad<=int(sys.argv[4]) if len(sys.argv)>4 else 6: 
                print(i, msg)
                if not isinstance(e, core.Mismatch): traceback.print_exc(limit=-4)
                if n==1: print(core.told(d.about))
        slow.append((time.time()-t1,i))
    print(n, "calls", bad, "bad", round(time.time()-t,1), "s", sorted(slow)[-3:])
main()
