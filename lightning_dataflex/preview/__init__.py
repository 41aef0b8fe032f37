"""What a configuration would do to rollouts that were saved: no model, no Trainer."""
