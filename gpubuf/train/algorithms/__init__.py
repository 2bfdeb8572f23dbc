"""The algorithms of ``gpubuf train``, a module each: networks, loss, optimiser and schedule of an agent.

To add one: write a subclass of `gpubuf.train.algorithms.base.Agent`, name it in `gpubuf.train.agent.AGENTS`, and give
its settings defaults in `gpubuf.train.algorithms.defaults`.
"""
