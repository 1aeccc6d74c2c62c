"""SGLang's models for reward models, mended: `SGLANG_EXTERNAL_MODEL_PACKAGE=megatron_gvpo_reward_models`.

SGLang puts the models that it finds here in place of its own of the same names.
"""
