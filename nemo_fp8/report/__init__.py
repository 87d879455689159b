"""Show results to people: tables and plots in one HTML file that loads nothing from elsewhere.

``page`` writes the file and ``figures`` draws for it; each ``*_page`` lays out one kind of result. The package itself
imports nothing heavy, so that the command line stays light.
"""
