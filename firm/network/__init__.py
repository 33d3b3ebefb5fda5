"""Clients at their own sites, over a network: the engine of sites, carried by NVIDIA FLARE.

`controller` is the server's end of the wire and `link` a site's; `kits` makes what each party
installs, `console` submits and watches. All of it but `states` needs the extra `network`.
"""
