"""Data sets of the papers: the files that each of them reads, and its objectives.

Contents of a local path, and the objectives::

    two_digits      none: uses the digits included in scikit-learn; left, right
    multi_mnist     x y of MNIST; left, right
    mnist_fmnist    x y of MNIST; second path: x y of Fashion-MNIST; mnist, fashion_mnist
    cifar10_mnist   x y of CIFAR-10; second path: x y of MNIST; cifar10, mnist
    mnist           x y; class; likewise fashion_mnist and cifar10
    femnist         x y writer; class
    celeba          x y, y [N, 40] in the order of CELEBA_ATTRIBUTES; the 40 attributes
    celeba5         as celeba; group_1 to group_5
    adult           X y domain; income
    river_flow      X Y, rows in chronological order; eight gauges
    qm9             atoms positions bonds targets, made by dense_molecules; eleven properties
    shakespeare     .jsonl or .jsonl.gz, one role with its utterances per line; next_character

Arrays are in a single `.npz` file, as `NAME_train` and `NAME_test` (and optionally
`NAME_validation`), or as `NAME` without splits. `x` are uint8 images [N, H, W], [N, H, W, C] or [N,
C, H, W].
"""
