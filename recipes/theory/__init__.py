"""The theory laboratory: T-FIRM on tabular MDPs, where every term of the proof can be measured.

`mdp` draws processes with a known kernel, `exact` computes values, gradients and the theory's
constants by linear algebra, `client` implements Algorithms 2 and 3 as a client of the federation,
`terms` measures the proof's terms and Lemma 1 in every local step, `laboratory` runs an experiment
through the strategy `firm`, `sweeps` varies it, `scaling` fits slopes, `page` draws them.
"""
