"""A Grafana dashboard over the metrics of /metrics: pageframe.json, to be imported there."""
