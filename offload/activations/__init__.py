"""`save_on_disk`: activations that are saved for backward and leave memory until backward needs them."""
