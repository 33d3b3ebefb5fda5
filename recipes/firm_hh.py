"""FIRM end to end: one language model, several objectives, several clients, one page of results.

    accelerate launch recipes/firm_hh.py                                    # the miniature world
    accelerate launch recipes/firm_hh.py --config configs/hh_tinyllama.yaml # the paper's run
    accelerate launch recipes/firm_hh.py --strategy.beta 0.5 --rounds 10    # any key, overridden
    accelerate launch recipes/firm_hh.py --plan                             # what would run
    accelerate launch recipes/firm_hh.py --out runs/mine --resume           # go on after a stop
    accelerate launch --num_processes 4 recipes/firm_hh.py                  # clients on 4 GPUs

A run is a directory: configuration, metrics, checkpoints, the adapter, and `report.html`.
"""

from firm.cli.align import cli

if __name__ == "__main__":
    cli(description=__doc__ or "")
