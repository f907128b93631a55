"""The metrics and traces of a server.

metric family: all samples of one metric name, as in Prometheus.
exposition: the text that the metrics endpoint returns for a scrape.
numbers: the counters of a version or of the server, from which families are rendered (`numbers.py`).
row: the times of one prediction, one column per stage (`stages.py`).
"""
