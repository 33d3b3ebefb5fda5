"""The data sets of the papers: the files that each reads, and its samples with objectives.

Contents of a local path, and the objectives::

    two_digits      nothing: scikit-learn's digits, which come with it; left, right
    multi_mnist     x y of MNIST; left, right
    mnist_fmnist    x y of MNIST; second path: x y of Fashion-MNIST; mnist, fashion_mnist
    cifar10_mnist   x y of CIFAR-10; second path: x y of MNIST; cifar10, mnist
    mnist           x y; class; and so fashion_mnist and cifar10
    femnist         x y writer; class
    celeba          x y, y [N, 40] in the order of CELEBA_ATTRIBUTES; the 40 attributes
    celeba5         the same; group_1 to group_5
    adult           X y domain; income
    river_flow      X Y, rows in the order of time; eight gauges
    qm9             atoms positions bonds targets, as dense_molecules makes them; eleven properties
    shakespeare     .jsonl or .jsonl.gz, a role with its utterances a line; next_character

Arrays are in one `.npz` file, as `NAME_train` and `NAME_test` (and `NAME_validation`), or as `NAME`
if they are not split. `x` are uint8 images [N, H, W], [N, H, W, C] or [N, C, H, W].
"""
