"""How torch sees a call: eagerly with a derivative, and as an operator where it is traced or transformed."""
