"""How TAG's weights were made: ``python -m tools.tag.train``.

problems    random models and clusters to train on
teacher     the strategies that the policy learns from
train       the training
"""
