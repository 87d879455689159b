"""What models look like, and which of their linears run in FP8. Standard library only.

families     one row a model family: what its config.json leaves out, and what its linears are called
shapes       a model as its linears, from a config.json
names        what a tensor is, from its name
layout       how a run is spread over ranks
selection    contract x model x layout -> for each linear how it is stored, or why it stays in the compute dtype
"""
