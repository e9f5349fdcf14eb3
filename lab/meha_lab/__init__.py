"""The laboratory of meha: problems with answers, experiments and their records, data sets, research tasks, benchmarks.

It is not part of the library's wheel; ``pip install -e lab`` in the repository installs it.
"""
