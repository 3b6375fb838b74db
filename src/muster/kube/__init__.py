"""How does muster talk to Kubernetes, and what does a cluster need before it can?

`client` speaks to the API server; `crd`, `rbac` and `manifests` render what `muster kube install` applies.
"""
