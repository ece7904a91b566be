"""MiniMax-H3 in plain torch: knows neither ComfyUI nor memory policy."""
