"""Learned search over placements: Monte Carlo tree search, TAG's policy for it, HeteroG's policy.

    evaluate    the simulator's judgement of one choice per group
    mcts        tree search, groups in order of cost
    improve     changes of the best strategy between its playouts
    moves       which groups change together
    choices     the effect of choices in seconds and bytes
    features    a model and a cluster as numbers without units
    tag         a network over both that is trained once and guides the search anywhere
    heterog     a network that is trained for one model on one cluster, by REINFORCE

TAG's weights were made by ``python -m tools.tag.train``. ``evaluate``, ``mcts``, ``improve``, ``moves``,
``choices`` and ``features`` need neither torch nor torch_geometric.
"""
