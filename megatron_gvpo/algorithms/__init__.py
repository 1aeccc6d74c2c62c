"""Methods as compositions of small pure blocks: sampler, batch policy, estimator, loss, aggregation."""
