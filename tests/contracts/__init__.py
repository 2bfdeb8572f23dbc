"""What every kernel, loss, sampler and buffer must do: configurations, models and properties that tests run."""
