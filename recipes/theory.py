"""FIRM's convergence theory, measured: Lemma 1 in every step, and each term of Theorem 1 by itself.

    python recipes/theory.py                                   # about three minutes on one core
    python recipes/theory.py --config configs/theory_smoke.yaml                # seconds
    python recipes/theory.py --experiment.client.critic.name exact --num_seeds 10 --out runs/mine

T-FIRM runs on random tabular MDPs, where values and gradients are known exactly. The results are a
directory: theory.html, theory.csv with every point of every seed, slopes.csv and config.yaml.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("theory", description=__doc__ or "")
