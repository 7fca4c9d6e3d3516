//! The simulation of the CUDA driver, and the contract that an arena keeps over every driver.

mod contract;
mod device;
