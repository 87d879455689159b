"""What models look like, and which of their linears run in FP8. Standard library only.

families     one row a model family: what its config.json leaves out, and the names of its linears
shapes       a model as its linears, from a config.json
names        what a tensor is, from its name
spellings    every name that a linear goes by
layout       how a run is spread over ranks
selection    the rule: which linears run in FP8, and why the others do not
units        the rule for a checkpoint, whose tensors an engine fuses
stored       the rule for a model on a layout: how each linear is stored, on either side
governed     which contract governs each linear, from two contracts and no model
one_naming   what a program that knows one naming of modules makes of a contract's patterns
"""
