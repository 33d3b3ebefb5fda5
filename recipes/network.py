"""One run across several sites, over a network, by NVIDIA FLARE (the extra `network`).

    python recipes/network.py provision --config configs/network.yaml --out my_federation
    python recipes/network.py start-server --kit my_federation/server     # on the server
    python recipes/network.py start-site --kit hospital                   # at each site
    python recipes/network.py submit --kit my_federation/admin            # whoever starts the run
    python recipes/network.py status --kit my_federation/admin
    python recipes/network.py stop --kit my_federation/admin

`provision` makes a folder for each party; hand each its own. A site runs this project as it is
installed there: no code comes over the network, and nothing leaves but adapters and the figures
that its policy names. `demo` does all of it on one machine. `COMMAND --help` prints what each can
be told.
"""

from firm.cli.main import run

if __name__ == "__main__":
    run("network", description=__doc__ or "")
