"""Environments of other libraries, as classes for `rollout.conversation.environment`."""
