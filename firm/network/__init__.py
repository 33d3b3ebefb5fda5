"""Federated training across sites, over NVIDIA FLARE.

`sites` is the server's engine, and `site` answers its requests within the site's `agreement`; both
are independent of the transport. `controller` connects the server to FLARE, and `link` connects a
site. `kits` creates the installation kit of each party; `console` submits and monitors runs.
"""
