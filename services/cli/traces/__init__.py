"""Trajectories of agents: what each appends and has generated, round by round. Pure but for files.

``trajectory`` has the types, ``generator`` makes trajectories of the papers' statistics,
``mooncake`` and ``message_lists`` read public traces.
"""
