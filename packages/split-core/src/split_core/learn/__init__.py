"""How a policy learns from a frozen backbone (Sec. 3.3-3.4): pure tensor code that knows no engine and no task.

The modules are imported by name (`split_core.learn.ppo`), so that this package itself imports no torch.
"""
