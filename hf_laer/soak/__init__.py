"""A long training run of a tiny model under drifting routing, held to an unpatched shadow: ``hf-laer soak``.

Beside the command line this is the only package below it that knows ``hf_laer.integrations``, and imports it late.
"""
