"""gym-trace train"""
