"""A model for a wanted trade-off, from the front that a sweep left.

    python recipes/pick_point.py --front runs/sweep/firm.front.json --want helpful=0.7,harmless=0.3
    python recipes/pick_point.py --front runs/sweep/firm.front.json \
        --want harmless=0.4,helpful=0.6 --merge --out runs/merged

The adapter that was trained for the nearest preference is named, or the adapters around the wish
are merged into one; with either goes what it should earn, and the commands that talk to it and
measure it. No model is loaded.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("pick", description=__doc__ or "")
