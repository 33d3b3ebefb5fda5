"""Clients at their sites, over a network by NVIDIA FLARE.

`sites` is the server's engine and `site` answers its requests, within the `agreement` that the site
made; neither knows what carries the messages. `controller` is FLARE's end of the wire at the server
and `link` that at a site; `kits` makes what each party installs, `console` submits and watches.
"""
