"""An example plugin: one policy, task, data set, model, reducer, attention backend and estimator."""
