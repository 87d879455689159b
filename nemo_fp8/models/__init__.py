"""What models look like, and which of their linears run in FP8. Standard library only.

families     one row a model family: what its config.json leaves out, and the names of its linears
shapes       a model as its linears, from a config.json
names        what a tensor is, from its name
layout       how a run is spread over ranks
selection    contract x model x layout -> how each linear is stored, or why it stays in the compute dtype
"""
